"""Decoding at temperatures above 0: sample-and-match, drawn drafts with rejection, and typical acceptance."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.all_drafters import short_spec
from benchmarks.experiment import SharedSettings, train
from benchmarks.harness import ResultTable, main, run_command, show
from benchmarks.learned_drafters import ARMS
from data.benchmarks import Question, load_questions
from inference.prompts import encode_question
from inference.results import folders
from inference.results.metrics import Summary
from inference.results.records import Answer
from inference.verifier.base import Base, load_base
from inference.verifier.sampling import KeyedSampler

TRAINING_FREE = [
    *("prompt_lookup", "anpd", "token_recycling", "lookahead", "self_draft", "joint:num_nodes=4", "joint"),
    *("self_speculative", "self_speculative:adaptive=false", "self_speculative:temperature={T}"),
]
DRAWN_CHAIN = "tree=chain,draws=1,depth=4,temperature={T}"
DRAWN_TREE = "tree=chain,draws=4,depth=4,num_nodes=16,temperature={T}"
# Options of each trained drafter: with trees that are matched with the base's draws, and with drafts that are drawn.
VARIANTS = {
    "medusa": ["num_nodes=16", "static={static}"],
    "hydra": ["num_nodes=16"],
    "eagle": ["num_nodes=16", "tree=chain,depth=4", DRAWN_CHAIN, DRAWN_TREE],
    "eagle3": ["num_nodes=16", "tree=chain,depth=4", DRAWN_CHAIN, DRAWN_TREE],
    "block_markov": ["num_nodes=16"],
    "ctc_markov": ["num_nodes=16", *(f"num_nodes=16,draws={draws},draw_temperature={{T}}" for draws in (1, 4))],
    "ctc_deep": ["num_nodes=16", "num_nodes=16,draws=4,draw_temperature={T}"],
}
Value = TypeVar("Value")
EQUATION = re.compile(r"\b(\d+) ([-+*/]) (\d+) = (\d+)\b")


def sampled_decoding(
    base: str,
    out: str,
    benchmark: str = "embedded",
    questions: str | None = None,
    files: list[str] = ["embedded:6000"],  # noqa: B006
    arms: list[str] = list(VARIANTS),  # noqa: B006
    steps: int = 600,
    drafter: list[str] = TRAINING_FREE,
    temperatures: list[float] = [0.6, 1.0],  # noqa: B006
    limit: int | None = None,
    max_new_tokens: int | None = None,
    repeats: str = "auto",
    threads: int = 0,
    table: str | None = None,
) -> None:
    """Train learned drafters, and decode with all drafters by each acceptance rule and temperature.

    Results that exist already are kept: repeat the command to continue an interrupted run.

    Args:
        base: Folder or hub id of the base.
        out: Folder for the drafters and the results.
        benchmark: Benchmark whose questions are decoded.
        questions: File with its questions; by default they come from the hub, or from the project itself (embedded).
        files: Training text of the learned drafters.
        arms: Learned drafters to train.
        steps: Training steps of each.
        drafter: Other drafters, where {T} stands for the temperature.
        temperatures: Sampling temperatures.
        limit: Maximum number of questions, evenly spaced.
        max_new_tokens: Maximum number of tokens of an answer.
        repeats: How often every question is decoded, as for `drafters eval`.
        threads: Number of torch threads; 0 keeps the default.
        table: Markdown file to write the tables to.
    """
    if unknown := set(arms) - VARIANTS.keys():
        raise ValueError(f"unknown arms {', '.join(sorted(unknown))}: known are {', '.join(VARIANTS)}")
    if threads:
        torch.set_num_threads(threads)
    folder = Path(out)
    common = SharedSettings(base, files, steps)
    trained = {name: train(ARMS[name], 0, common, folder) for name in arms}
    specs = [*drafter, *trained_specs(base, files, trained, folder)]
    command = ["eval", "--base", base, "--benchmark", benchmark, "--spaced", "--repeats", repeats]
    command += [f"--questions={questions}"] if questions else []
    command += [f"--limit={limit}"] if limit else []
    command += [f"--max-new-tokens={max_new_tokens}"] if max_new_tokens else []
    frozen = load_base(base)
    asked = {question.question_id: question for question in load_questions(benchmark, questions)}
    tables = []
    for temperature in temperatures:
        filled = [spec.replace("{T}", str(temperature)) for spec in specs]
        # Typical acceptance is a rule for drafts that are not drawn: it leaves their distributions unread.
        matched = [spec for spec, before in zip(filled, specs, strict=True) if "{T}" not in before]
        runs = {}
        for rule, chosen in (("exact", filled), ("typical", matched)):
            place = folder / f"{rule}-{temperature}"
            if not (place / "results.json").exists():
                arguments = [f"--drafter={spec}" for spec in chosen] + [f"--out={place}"]
                arguments += [f"--temperature={temperature}", *(["--typical=true"] if rule == "typical" else [])]
                run_command([*command, *arguments])
            runs[rule] = folders.read(place)
        exact, typical = (without_marks(runs[rule].summaries[benchmark]) for rule in ("exact", "typical"))
        tables.append(exact_table(exact, temperature))
        answers = without_marks(runs["typical"].answers[benchmark])
        tables.append(typical_table(exact, typical, answers, temperature, frozen, asked))
    show(tables, torch.device("cpu"), table)


def without_marks(by_name: Mapping[str, Value]) -> dict[str, Value]:
    """Remove the mark of lossy decoding from the names of drafters."""
    return {name.removesuffix(" (lossy)"): value for name, value in by_name.items()}


def trained_specs(base: str, files: Sequence[str], trained: Mapping[str, Path], folder: Path) -> list[str]:
    """Return the specs of all variants of the trained drafters; makes Medusa's static tree if it is missing."""
    static = folder / "static.json"
    if "medusa" in trained and not static.exists():
        data = [f"--data={file}" for file in files]
        sizes = ["--num-nodes=16", f"--out={static}"]
        run_command(["tree-search", "--base", base, "--drafter", f"medusa={trained['medusa']}", *data, *sizes])
    return [
        f"{ARMS[name].drafter.lower()}={trained[name]}:{options.replace('{static}', str(static))}"
        for name in trained
        for options in VARIANTS[name]
    ]


def exact_table(summaries: Mapping[str, Summary], temperature: float) -> ResultTable:
    """The cost and the speed of exact sampling with every drafter."""
    headings = ["drafter", "acceptance", "fed tokens/step", "draft forwards/step", "speed-up", "same text"]
    table = ResultTable(f"Exact sampling at temperature {temperature}", headings)
    for name, summary in summaries.items():
        counts = [f"{count:.1f}" for count in (summary.fed_per_step or 0, summary.draft_forwards_per_step or 0)]
        same = f"{summary.identical}/{summary.questions}"
        table.rows.append(
            [short_spec(name), f"{summary.acceptance_length:.2f}", *counts, f"{summary.speedup:.2f}×", same]
        )
    table.notes = [
        "Same text: answers equal to those of the base alone with the same seed. Drafts that are drawn (options with a "
        "temperature) are accepted by multi-round rejection, which gives other texts of the same distribution."
    ]
    return table


def typical_table(
    exact: Mapping[str, Summary],
    typical: Mapping[str, Summary],
    answers: Mapping[str, Sequence[Answer]],
    temperature: float,
    base: Base,
    questions: Mapping[int, Question],
) -> ResultTable:
    """What typical acceptance gains, and what it does to the texts, of which ``answers`` has those it accepted."""
    headings = ["drafter", "acceptance, exact", "typical", "speed-up, exact", "typical"]
    headings += ["log-probability per token", "true equations"]
    table = ResultTable(f"Typical acceptance at temperature {temperature}", headings)
    for name in typical:
        cells = [f"{one[name].acceptance_length:.2f}" for one in (exact, typical)]
        cells += [f"{one[name].speedup:.2f}×" for one in (exact, typical)]
        cells += [f"{log_probability(base, questions, answers[name], temperature):.3f}"]
        cells += ["{}/{}".format(*true_equations(answers[name]))]
        table.rows.append([short_spec(name), *cells])
    table.notes = [
        "Log-probability: the base's own log-probability at this temperature, mean over the tokens of the answers, in "
        "nats; with exact sampling it is minus the base's entropy on average. All these drafters write the "
        "texts of the first row with exact sampling.",
        "True equations: calculations such as 7 * 9 = 63 in the answers that are right.",
    ]
    return table


@torch.inference_mode()
def log_probability(
    base: Base, questions: Mapping[int, Question], answers: Sequence[Answer], temperature: float
) -> float:
    """Mean log-probability of an answer's token, in nats, under the base at this temperature."""
    sampler, total, count = KeyedSampler(temperature), 0.0, 0
    for answer in answers:
        question, messages = questions[answer.question_id], []
        for text, turn in zip(question.turns, answer.turns, strict=False):
            messages.append(("user", text))
            prompt = encode_question(base, question, messages, "tokenizer")
            messages.append(("assistant", turn.text))
            tokens = torch.tensor(turn.token_ids, device=base.model.device)
            logits = base.model(torch.tensor([[*prompt, *turn.token_ids]], device=tokens.device)).logits[0]
            probabilities = sampler.probabilities(logits[len(prompt) - 1 : -1].float())
            total += float(probabilities.gather(1, tokens[:, None]).log().sum())
            count += len(tokens)
    return total / count


def true_equations(answers: Sequence[Answer]) -> tuple[int, int]:
    """Count the calculations in answers that are right, and all of them."""
    found = [match.groups() for answer in answers for turn in answer.turns for match in EQUATION.finditer(turn.text)]
    right = {
        "+": lambda a, b, c: a + b == c,
        "-": lambda a, b, c: a - b == c,
        "*": lambda a, b, c: a * b == c,
        "/": lambda a, b, c: b * c == a,
    }
    return sum(right[sign](int(a), int(b), int(c)) for a, sign, b, c in found), len(found)


if __name__ == "__main__":
    main(sampled_decoding)
