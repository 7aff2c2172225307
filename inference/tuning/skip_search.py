"""``drafters skip-search``: predict which sublayers the base can skip when it drafts for itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from data.benchmarks import Question
from data.files import SafeConsole, validated, write_text
from drafters import SelfSpeculative
from inference.evaluation.question_options import QuestionOptions
from inference.journal import Journal
from inference.outputs import new_file
from inference.progress import progress_bars
from inference.prompts import BenchmarkPrompts
from inference.tuning.bayesian_search import bayesian_search
from inference.tuning.local_search import Layers, SkipSet, as_layers, search
from inference.tuning.skip_probe import Probe, draft_cost, measured_shares, parameter_shares, speed_up
from inference.verifier.base import Base
from inference.verifier.layer_skipping import LayerSkippingSession, default_skips, sublayers
from inference.verifier.options import ModelOptions
from inference.verifier.runner import Runner
from inference.verifier.sampling import Greedy
from inference.verifier.session import Session
from inference.verify import generate_reference


@dataclass(frozen=True)
class SkipSearchQuestions(QuestionOptions):
    """The questions whose first turns are answered, with a larger limit than elsewhere."""

    limit: int | None = 20


@dataclass(frozen=True)
class SkipSearchOptions:
    """What is searched, and for how long.

    Args:
        num_draft: Maximum number of draft tokens that is considered.
        stride: Distance in tokens between the starts of two drafts along an answer.
        evaluations: Maximum number of skip sets to try.
        cost: How the cost of a draft token is found: parameters takes the share of the parameters that it reads,
            measured takes its share of the base's time on this machine.
        objective: What is maximised: predicted is the speed-up predicted from accepted drafts and cost, speed is the
            tokens per second of decoding with drafts of num_draft tokens, as in the paper.
        method: Local search, or the paper's Bayesian optimisation.
        seed: Seed of the search.
    """

    num_draft: int = 8
    stride: int = 4
    evaluations: int = 400
    cost: Literal["parameters", "measured"] = "parameters"
    objective: Literal["predicted", "speed"] = "predicted"
    method: Literal["local", "bayesian"] = "local"
    seed: int = 0


@dataclass(frozen=True)
class SkipSetResult:
    """The best skip set and what is predicted of it.

    Args:
        attention: Layers whose attention is skipped.
        mlp: Layers whose MLP is skipped.
        num_layers: Number of layers of the base.
        num_draft: Draft length with the largest predicted speed-up.
        agreement: Share of the drafts whose first token is accepted.
        draft_cost: Cost of a draft token in base forwards.
        predicted_speedup: Predicted speed-up, for the answers it was chosen with.
        tokens_per_second: Speed of decoding, if that was the objective.
    """

    attention: tuple[int, ...]
    mlp: tuple[int, ...]
    num_layers: int
    num_draft: int
    agreement: float
    draft_cost: float
    predicted_speedup: float
    tokens_per_second: float | None = None


def skip_search(
    model: ModelOptions,
    selection: SkipSearchQuestions,
    options: SkipSearchOptions,
    out: str,
    overwrite: bool = False,
) -> None:
    """Search the sublayers that self-speculative decoding skips, for the drafter self_speculative=OUT.

    The skipped base drafts along the base's own greedy answers, which shows how many draft tokens would be accepted.
    From this and from the cost of a draft token, a speed-up is predicted. The best set is the one with the largest
    prediction for the answers that it was chosen with; only `drafters eval` on other questions measures its speed. If
    the search is interrupted, repeat the command to continue; with more --evaluations it continues a finished search.

    Args:
        model: The base.
        selection: The questions.
        options: What is searched.
        out: JSON file for the best set; a file next to it that ends in .search.jsonl holds the progress of the search.
        overwrite: Start over, and replace what an earlier search left.
    """
    path, journal_path = check(selection, options, out, overwrite)
    settings = recorded_settings(model, selection, options)
    journal = Journal(journal_path, settings, existing="replace" if overwrite else "continue")
    survival, speeds = read_survival(journal), read_speeds(journal)
    questions: list[Question] = selection.load()
    base = model.load()
    prompts = selection.select(base, questions)
    with journal:
        best, num_drafts = run(base, prompts, selection.max_new_tokens, options, journal, survival, speeds)
    write(path, settings, best, options.cost)
    print_result(model.base, out, prompts.notes(), best, options.cost, num_drafts)


def check(selection: QuestionOptions, options: SkipSearchOptions, out: str, overwrite: bool) -> tuple[Path, Path]:
    """Return the paths of the result and of the journal.

    Raises:
        ValueError: A number is out of range, a file cannot be written, or there is a result that no journal continues.
    """
    if min(options.num_draft, options.stride, options.evaluations) < 1 or selection.max_new_tokens <= options.num_draft:
        raise ValueError(
            "num_draft, stride and evaluations must be at least 1 and max_new_tokens larger than num_draft, not "
            f"{options.num_draft}, {options.stride}, {options.evaluations} and {selection.max_new_tokens}"
        )
    path = new_file(out, overwrite=True)  # a search that continues replaces the result
    journal_path = new_file(str(path.with_suffix(".search.jsonl")), overwrite=True)
    if path.exists() and not journal_path.exists() and not overwrite:
        raise ValueError(
            f"{out} exists, but {journal_path}, which would continue its search, does not: pass --overwrite, or "
            "choose another --out"
        )
    return path, journal_path


def recorded_settings(
    model: ModelOptions, selection: QuestionOptions, options: SkipSearchOptions
) -> dict[str, str | int | None]:
    """Everything that the journal's entries depend on, for the journal and the result."""
    settings: dict[str, str | int | None] = {
        "base": model.base,
        "benchmark": selection.benchmark,
        "questions": selection.questions,
        "limit": selection.limit,
        "template": selection.template,
        "max_new_tokens": selection.max_new_tokens,
        "longest_draft": options.num_draft,
        "stride": options.stride,
        "dtype": model.dtype,
    }
    # Journals from before --offset and --objective existed have no such keys.
    settings |= {"offset": selection.offset} if selection.offset else {}
    return settings | ({"objective": options.objective} if options.objective != "predicted" else {})


def read_survival(journal: Journal) -> dict[SkipSet, list[float]]:
    """Read what the journal holds: by skip set, the shares of drafts whose first 1, 2, ... tokens are accepted.

    Raises:
        ValueError: An entry is damaged.
    """

    def read(entry: dict[str, Any]) -> tuple[SkipSet, list[float]]:
        return validated(tuple[frozenset[int], list[float]], (entry["skips"], entry["survival"]))

    return dict(journal.entries(read))


def read_speeds(journal: Journal) -> dict[SkipSet, float]:
    """Read what the journal holds: by skip set, the tokens per second of decoding; empty if it was not measured.

    Raises:
        ValueError: An entry is damaged.
    """

    def read(entry: dict[str, Any]) -> tuple[SkipSet, float]:
        return validated(tuple[frozenset[int], float], (entry["skips"], entry["tokens_per_second"]))

    return dict(journal.entries(read)) if journal.settings.get("objective") == "speed" else {}


def decoding_speed(
    runner: Runner, layers: Layers, prompts: list[list[int]], num_draft: int, max_new_tokens: int
) -> float:
    """Tokens per second of greedy self-speculative decoding, with drafts of ``num_draft`` tokens.

    Args:
        runner: Runner of the base.
        layers: Layers whose attention is skipped, and those whose MLP is skipped.
        prompts: Token ids of the prompts.
        num_draft: Number of tokens of a draft.
        max_new_tokens: Maximum number of tokens of a text.
    """
    drafter = SelfSpeculative(LayerSkippingSession(runner, *layers), num_draft, threshold=0.0, adaptive=False)
    session = Session(runner, drafter)
    texts = [session.run(prompt, max_new_tokens, runner.base.eos) for prompt in prompts]
    return sum(len(text.tokens) for text in texts) / sum(text.seconds for text in texts)


def run(
    base: Base,
    prompts: BenchmarkPrompts,
    max_new_tokens: int,
    options: SkipSearchOptions,
    journal: Journal,
    survival: dict[SkipSet, list[float]],
    speeds: dict[SkipSet, float],
) -> tuple[SkipSetResult, int]:
    """Let the base answer, then search; new entries go to the journal, to ``survival`` and to ``speeds``.

    Returns:
        The best skip set, and the number of drafts that the prediction rests on.
    """
    num_layers = len(sublayers(base.model.base_model)[0])
    default = frozenset(layer + half * num_layers for half in (0, 1) for layer in default_skips(num_layers)[half])
    with progress_bars(transient=True) as progress:
        tracked = progress.track(prompts.prompts, description="the base answers")
        texts = [(prompt, generate_reference(base, prompt, max_new_tokens, Greedy())) for prompt in tracked]
        probe = Probe(base, texts, options.num_draft, options.stride)
        shares = parameter_shares(base) if options.cost == "parameters" else measured_shares(base, texts[0][0])
        task = progress.add_task("skip sets", total=min(options.evaluations, 4**num_layers))

        runner = Runner(base)

        def score(skips: SkipSet) -> float:
            if skips not in survival:
                layers = as_layers(skips, num_layers)
                survival[skips] = probe.survival(*layers)
                entry = {"skips": sorted(skips), "survival": survival[skips]}
                if options.objective == "speed":
                    speeds[skips] = decoding_speed(runner, layers, prompts.prompts, options.num_draft, max_new_tokens)
                    entry["tokens_per_second"] = speeds[skips]
                journal.append(entry)
            progress.advance(task)
            if options.objective == "speed":
                return speeds[skips]
            return speed_up(survival[skips], draft_cost(shares, skips))[0]

        method = bayesian_search if options.method == "bayesian" else search
        best = method(score, 2 * num_layers, [frozenset(), default], options.evaluations, options.seed)
    cost = draft_cost(shares, best)
    predicted, num_draft = speed_up(survival[best], cost)
    if options.objective == "speed":
        num_draft = options.num_draft
    attention, mlp = as_layers(best, num_layers)
    result = SkipSetResult(attention, mlp, num_layers, num_draft, survival[best][0], cost, predicted, speeds.get(best))
    return result, len(probe.expected)


def write(path: Path, settings: dict[str, Any], best: SkipSetResult, cost: str) -> None:
    """Write the best set as JSON."""
    record = {
        "attention": best.attention,
        "mlp": best.mlp,
        **settings,
        "num_layers": best.num_layers,
        "num_draft": best.num_draft,
        "agreement": best.agreement,
        "draft_cost": best.draft_cost,
        "cost": cost,
        "predicted_speedup": best.predicted_speedup,
    }
    if best.tokens_per_second is not None:
        record["tokens_per_second"] = best.tokens_per_second
    write_text(path, json.dumps(record, indent=2) + "\n")


def print_result(base: str, out: str, notes: list[str], best: SkipSetResult, cost: str, num_drafts: int) -> None:
    """Print the best set, and the command that measures it."""
    console = SafeConsole(soft_wrap=True, highlight=False)
    for note in notes:
        console.print(f"left out: {note}", markup=False)
    if best.tokens_per_second is not None:
        console.print(f"{best.tokens_per_second:.1f} tokens per second, the fastest of the sets tried", markup=False)
    console.print(
        f"best set: attention of layers {list(best.attention)} and MLP of layers {list(best.mlp)} skipped\n"
        f"agreement {best.agreement:.1%} of first draft tokens; a draft token costs {best.draft_cost:.2f} base "
        f"forwards ({cost}); drafts of {best.num_draft} tokens\n"
        f"predicted speed-up {best.predicted_speedup:.2f}, chosen and predicted on the same {num_drafts} drafts; this "
        "is no measurement. Measure it on other questions:\n"
        f"  drafters eval --base {base} --drafter self_speculative={out}:num_draft={best.num_draft},threshold=0,"
        "adaptive=false",
        markup=False,
    )
