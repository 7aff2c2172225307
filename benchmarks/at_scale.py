"""Speed of drafters at the sizes people use: a small trained base and its drafters, decoded at the cost of a large one.

`benchmarks.widening` makes the large base and its drafters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal, cast

import torch

from benchmarks.harness import SHAPES, ResultTable, main, markdown, origin
from benchmarks.widening import widen_base, widen_drafter
from data.benchmarks import Question
from data.files import read_json, short_hash, write_text
from drafters import Merged, checkpoint
from drafters.protocol import Drafter, LearnedDrafter
from inference import drafter_specs
from inference.evaluate.answers import Answer, comparable, decode_steps, median_answers, turns_of
from inference.evaluate.figures import acceptance_length, count_identical, pair_answers, summarise
from inference.evaluate.own_loop import answer_questions
from inference.options import QuestionOptions
from inference.runs import progress_bars
from inference.verifier.base import Base, load_base, prepare_process, resolve_device
from inference.verifier.graphed import make_runner
from inference.verifier.packed import pack_weights
from inference.verifier.runner import Runner
from inference.verifier.session import PHASES, Session, Step
from train.callbacks import peak_bytes

Repeats = Sequence[Sequence[Answer]]  # the answers of each repeat, in the order of the questions
NONE = "none"  # the base alone
TEMPLATE = "tokenizer"
COLUMNS = {  # of tables, from what `measure` returns
    "speed-up": "{speedup:.2f}×",
    "wall": "{wall_speedup:.2f}×",
    "acceptance": "{acceptance_length:.3f}",
    "small base's": "{small_acceptance_length:.3f}",
    "fed": "{fed_per_step:.1f}",
    "identical": "{identical}/{questions}",
    "steps": "{same_steps_as_small}/{questions}",
    "step, ms": "{step_ms:.2f}",
    "IQR": "{step_spread:.0%}",
    "draft": "{draft_ms:.2f}",
}


def at_scale(
    base: str = "checkpoints/tiny-chat",
    shape: str = "1b",
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    drafter: list[str] | None = None,
    benchmark: str = "embedded",
    rows: str = ":",
    limit: int = 5,
    max_new_tokens: int = 48,
    repeats: int = 1,
    vocab_size: int = 32000,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    packed: bool = False,
    graphed: bool | None = None,
    out: str | None = None,
) -> None:
    """Decode with a small trained base that computes at the cost of a large one, with all drafters side by side.

    The base and its learned drafters are widened to the shape: they write the same texts and draft the same trees, and
    a step costs what it costs for a base of that shape. Other drafters (joint, anpd, ...) are used as they are.

    Args:
        base: Folder of the trained base, of the LLaMA family.
        shape: Shape of the large base: 100m, 1b (LLaMA 3.2), 3b (LLaMA 3.2), 7b (Vicuna) or 8b (LLaMA 3).
        dtype: Dtype of the large weights.
        drafter: NAME[=FOLDER][:key=value,...] as in `drafters eval`, such as ctc=FOLDER:num_nodes=16; may be repeated.
        benchmark: Benchmark whose questions are answered, as in `drafters eval`: embedded, gsm8k=FILE, ...
        rows: Rows of the questions, as START:STOP.
        limit: Maximum number of questions.
        max_new_tokens: Maximum number of tokens of a turn.
        repeats: Number of times that every question is decoded; the steps of all of them count.
        vocab_size: Vocabulary of the large base.
        device: Device to run on; auto uses the GPU if there is one.
        packed: Pack the weights of the large base and its drafters, on a CPU only.
        graphed: Run the steps of the large base, and the drafts, in CUDA graphs; by default on a GPU.
        out: Folder for the results of this run as JSON, and for the tables of all runs in the folder.
    """
    if min(limit, repeats) < 1 or max_new_tokens < 2:
        raise ValueError("limit and repeats must be at least 1, and max_new_tokens at least 2")
    specs = _checked_specs(shape, drafter or ["prompt_lookup", "joint"])
    prepare_process(resolve_device(device), sums_alike=True)
    small = load_base(base, "float32", resolve_device(device))
    options = QuestionOptions([benchmark], limit, rows, max_new_tokens, TEMPLATE)
    (prompts,) = options.select(small, options.load()).values()
    wide_vocab = max(vocab_size, small.shape.vocab_size)
    wide = widen_base(small, f"{base} at {shape}", SHAPES[shape], wide_vocab, getattr(torch, dtype))
    wide, num_parameters = replace(wide, graphed=graphed), _num_parameters(wide.model)
    if packed:
        pack_weights(wide.model)
    result: dict[str, Any] = {
        "title": f"{Path(base).name} at the shape {shape}, {dtype}",
        "base": base,
        "shape": shape,
        "dtype": dtype,
        "parameters": num_parameters,
        "settings": (
            f"{len(prompts.questions)} questions of {benchmark}, at most {max_new_tokens} tokens a turn, greedy, "
            f"{repeats} repeats in one run in which the drafters alternate on each question; vocabulary "
            f"{wide.shape.vocab_size:,}; packed weights: {packed}; CUDA graphs: {wide.wants_graphs}."
        ),
        "drafters": compare(small, make_runner(wide), specs, prompts.questions, max_new_tokens, repeats),
        "origin": origin(wide.model.device),
        "peak_bytes": peak_bytes(wide.model.device),
    }
    print(markdown([result_table(result)], result["origin"]))
    if out:
        write_results(Path(out), result)


def compare(
    small: Base,
    runner: Runner,
    specs: Mapping[str, str],
    questions: list[Question],
    max_new_tokens: int,
    repeats: int = 1,
) -> dict[str, dict[str, Any]]:
    """Decode with a base at its own shape and with the runner of the widened one, and return figures by drafter."""
    small = replace(small, graphed=False)
    drafters = {name: drafter_specs.make(spec, make_runner(small)) for name, spec in specs.items()}
    at_own_shape = decode(make_runner(small), drafters, questions, max_new_tokens, 1, f"{small.name} at its own shape")
    small_answers = {name: each[0] for name, each in at_own_shape.items()}
    wide_drafters = {name: _wide(specs[name], drafter, small, runner) for name, drafter in drafters.items()}
    answers = decode(runner, wide_drafters, questions, max_new_tokens, repeats, runner.base.name)
    return {
        name: {"parameters": _num_parameters(each), **measure(name, answers, small_answers)}
        for name, each in wide_drafters.items()
    }


def _checked_specs(shape: str, drafters: Sequence[str]) -> dict[str, str]:
    """The spec of each drafter by its name in the tables, the base alone first; raises ValueError if one is wrong."""
    if shape not in SHAPES:
        raise ValueError(f"unknown shape {shape!r}: known are {', '.join(SHAPES)}")
    specs = drafter_specs.labels([NONE, *(spec for spec in drafters if spec != NONE)])
    for spec in specs.values():
        if drafter_specs.split(spec).name == "self_speculative":
            raise ValueError(f"{spec} would skip layers that were added and do nothing: leave it out")
    return specs


def decode(
    runner: Runner,
    drafters: Mapping[str, Drafter],
    questions: list[Question],
    max_new_tokens: int,
    repeats: int,
    title: str,
) -> dict[str, list[list[Answer]]]:
    """Answer all questions with all drafters, which alternate; the answers by drafter and repeat."""
    sessions = {name: Session(runner, each) for name, each in drafters.items()}
    answers: dict[str, list[list[Answer]]] = {name: [[] for _ in range(repeats)] for name in drafters}
    with progress_bars(transient=True) as bars:
        task = bars.add_task(title, total=repeats * len(questions) * len(drafters))
        for repeat in range(repeats):
            for answer in answer_questions(sessions, questions, TEMPLATE, max_new_tokens, repeat=repeat):
                answers[answer.drafter][repeat].append(answer)
                bars.advance(task)
    return answers


def _wide(spec: str, drafter: Drafter, small: Base, runner: Runner) -> Drafter:
    """The drafter of the wide base: a learned one is widened, also in a merged one, and any other is made anew."""
    if not isinstance(drafter, LearnedDrafter | Merged):
        return drafter_specs.make(spec, runner)
    init_args = checkpoint.read_config(Path(str(drafter_specs.split(spec).file))).init_args
    if isinstance(drafter, LearnedDrafter):
        return widen_drafter(drafter, init_args, small.shape, runner.base)
    merged = cast(Merged, drafter_specs.make(spec, make_runner(small)))  # anew, as the first one knows the texts by now
    merged.learned = widen_drafter(merged.learned, init_args, small.shape, runner.base)
    return merged


def _num_parameters(module: object) -> int:
    module = module.learned if isinstance(module, Merged) else module
    return sum(weight.numel() for weight in module.parameters()) if isinstance(module, torch.nn.Module) else 0


# ---- results


def decoding_seconds(steps: Sequence[Step]) -> float:
    """Seconds of all steps, each counted as the median of those that fed as many tokens."""
    by_fed: dict[int, list[float]] = {}
    for step in steps:
        by_fed.setdefault(step.fed, []).append(sum(step.seconds))
    return sum(len(times) * median(times) for times in by_fed.values())


def measure(name: str, wide: Mapping[str, Repeats], small: Mapping[str, Sequence[Answer]]) -> dict[str, Any]:
    """Results of one drafter, from the answers of the wide base and those of the small base in float32."""
    answers = median_answers(wide[name])
    summary = summarise(wide[name], wide[NONE])
    steps, base_steps = (decode_steps(turns_of(chain(*wide[key]))) for key in (name, NONE))
    seconds, base_seconds = (
        decoding_seconds(each) / sum(step.emitted for step in each) for each in (steps, base_steps)
    )
    times = [sum(step.seconds) for step in steps]
    low, _, high = quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    draft = [sum(step.seconds[PHASES.index(phase)] for phase in ("propose", "observe")) for step in steps]
    by_phase = zip(*(step.seconds for step in steps), strict=True)
    compared = zip(map(comparable, answers), map(comparable, small[name]), strict=True)
    return {
        "questions": len(answers),
        "acceptance_length": summary.acceptance.length.value,
        "fed_per_step": summary.acceptance.fed_per_step,
        "speedup": base_seconds / seconds,
        "wall_speedup": summary.speed.wall.value,
        "step_ms": 1e3 * median(times),
        "step_spread": (high - low) / median(times),
        "draft_ms": 1e3 * median(draft),
        "phases_ms": {name: 1e3 * median(each) for name, each in zip(PHASES, by_phase, strict=True)},
        "ms_per_token": 1e3 * seconds,
        "identical": summary.identical,
        "small_acceptance_length": acceptance_length(turns_of(small[name])),
        "same_texts_as_small": count_identical(pair_answers(answers, small[NONE]))["identical"],
        "same_steps_as_small": sum(own == other for own, other in compared),
    }


def result_table(result: Mapping[str, Any]) -> ResultTable:
    """The table of a run, from its JSON."""
    table = ResultTable(result["title"], ["drafter", "parameters", *COLUMNS])
    for name, own in result["drafters"].items():
        size = f"{own['parameters'] / 1e6:,.1f} M" if own["parameters"] else ""
        table.rows.append([name, size, *(column.format_map(own) for column in COLUMNS.values())])
    same = min(own["same_texts_as_small"] for own in result["drafters"].values())
    count = result["drafters"][NONE]["questions"]
    table.notes = [
        result["settings"],
        "speed-up: seconds per token relative to none, prefill excluded, each step counted as the median of the steps "
        "that feed as many tokens; wall: by wall time, prefill included. step, draft: medians of a step and of the "
        "drafter's part; IQR: interquartile range of a step's time / its median.",
        "small base's: acceptance length of the same drafter on the same questions at the base's own shape in float32; "
        f"steps: answers whose tokens and steps are those there, one by one (at least {same} of {count} texts are); "
        "identical: answers that are the same as without a drafter in this run.",
        f"The base has {result['parameters'] / 1e6:,.1f} M parameters; peak memory with all drafters "
        f"{result['peak_bytes'] / 2**30:.1f} GiB.",
    ]
    return table


def write_results(folder: Path, result: Mapping[str, Any]) -> None:
    """Write a run, and the tables of all runs in the folder."""
    name = f"{Path(result['base']).name}-{result['shape']}-{result['dtype']}".replace("/", "-")
    name += f"-{short_hash(json.dumps([result['settings'], list(result['drafters'])]))}"
    write_text(folder / f"{name}.json", json.dumps(result, indent=1) + "\n")
    results: list[Any] = [read_json(path) for path in sorted(folder.glob("*.json"))]
    tables = [markdown([result_table(each)], each["origin"]) for each in results]
    write_text(folder / "at_scale.md", "\n".join(tables))


if __name__ == "__main__":
    main(at_scale)
