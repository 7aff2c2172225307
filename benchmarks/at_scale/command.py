"""The benchmark: a small trained base and its drafters, decoded at the cost of a large shape."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch

from benchmarks.at_scale.measurements import NONE, SearchClock, measure, plot_scaling, tables
from benchmarks.at_scale.widening import widen_base, widen_drafter
from benchmarks.harness import SHAPES, origin, show
from data.benchmarks import Question
from data.files import read_json, write_text
from drafters import Merged, checkpoint
from drafters.protocol import Drafter, LearnedDrafter
from inference import drafter_specs
from inference.budget import Budgeted
from inference.evaluate import metrics, plots
from inference.evaluate.answers import Answer, answer_questions, median_answers
from inference.questions import QuestionOptions
from inference.runs import progress_bars
from inference.verifier.base import Base, load_base, resolve_device
from inference.verifier.packed import pack_weights
from inference.verifier.runner import Runner
from inference.verifier.session import Session
from train.callbacks import peak_bytes

TEMPLATE = "tokenizer"
PACKED = {False: "", True: ", packed weights", "alone": ", packed weights alone"}


def at_scale(
    base: str = "checkpoints/tiny-chat",
    shape: str = "1b",
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    drafter: list[str] | None = None,
    benchmark: str = "embedded",
    questions: str | None = None,
    offset: int = 0,
    limit: int = 5,
    max_new_tokens: int = 48,
    repeats: int = 1,
    vocab_size: int = 32000,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    threads: int = 0,
    packed: bool | Literal["alone"] = False,
    out: str | None = None,
) -> None:
    """Decode with a small trained base that computes at the cost of a large one, with all drafters side by side.

    The base and its learned drafters are widened to the shape: they write the same texts and draft the same trees, and
    a step costs what it costs for a base of that shape. Other drafters (joint, anpd, ...) are used as they are.

    Args:
        base: Folder of the trained base, of the LLaMA family.
        shape: Shape of the large base: 100m, 1b (LLaMA 3.2), 3b (LLaMA 3.2) or 7b (Vicuna).
        dtype: Dtype of the large weights.
        drafter: NAME[=FOLDER][:key=value,...] as in `drafters eval`, such as ctc=FOLDER:num_nodes=16; may be repeated.
            With num_nodes=auto, steps depend on their times and are not those of the small base.
        benchmark: Name of the benchmark whose questions are answered.
        questions: File with the questions; those of embedded come from the package.
        offset: Number of questions to skip at the beginning.
        limit: Maximum number of questions.
        max_new_tokens: Maximum number of tokens of a turn.
        repeats: Number of times that every question is decoded; the steps of all of them count.
        vocab_size: Vocabulary of the large base.
        device: Device to run on; auto uses the GPU if there is one.
        threads: Number of torch threads; 0 keeps the default.
        packed: Pack the weights of the large base and its drafters, on a CPU only. With alone, the base has no plain
            weights beside the packed ones, so that a shape fits into memory that would not twice.
        out: Folder for the results of this run as JSON and a plot of its phases, for the tables of all runs in the
            folder, and for the plot of the speed-up against the parameters.
    """
    if min(limit, repeats) < 1 or max_new_tokens < 2:
        raise ValueError("limit and repeats must be at least 1, and max_new_tokens at least 2")
    specs = _checked_specs(shape, drafter or ["prompt_lookup", "joint"])
    if threads:
        torch.set_num_threads(threads)
    small = load_base(base, "float32", resolve_device(device))
    named = benchmark if questions is None else f"{benchmark}={questions}"
    options = QuestionOptions([named], limit, f"{offset}:", max_new_tokens, TEMPLATE)
    chosen = options.select(small, options.load())[benchmark].questions
    drafters = {name: drafter_specs.make(spec, Runner(small)) for name, spec in specs.items()}
    small_answers = decode(small, drafters, specs, chosen, max_new_tokens, 1, f"{base} at its own shape")
    wide = widen_base(
        small, f"{base} at {shape}", SHAPES[shape], max(vocab_size, small.shape.vocab_size), _dtype(dtype)
    )
    num_parameters = _num_parameters(wide.model)
    if packed:
        pack_weights(wide.model, alone=packed == "alone")
    runner = Runner(wide)
    wide_drafters = {name: _wide(specs[name], drafter, small, runner) for name, drafter in drafters.items()}
    clocks = {name: SearchClock(each) for name, each in wide_drafters.items()}
    answers = decode(wide, wide_drafters, specs, chosen, max_new_tokens, repeats, wide.name)
    first_small = {name: each[0] for name, each in small_answers.items()}
    result = {
        "title": f"{Path(base).name} at the shape {shape}, {dtype}",
        "base": base,
        "shape": shape,
        "dtype": dtype,
        "parameters": num_parameters,
        "peak_bytes": peak_bytes(wide.model.device),
        "settings": [
            f"{len(chosen)} questions of {benchmark} from {offset}, at most {max_new_tokens} tokens a turn, greedy, "
            f"{repeats} repeats in one run in which the drafters alternate on each question; vocabulary "
            f"{wide.shape.vocab_size:,}{PACKED[packed]}."
        ],
        "origin": origin(wide.model.device),
        "drafters": {
            name: measure(name, answers, first_small, clocks[name], _num_parameters(each))
            for name, each in wide_drafters.items()
        },
    }
    show(tables(result), wide.model.device, None)
    if out:
        write_results(Path(out), result, answers)


def _checked_specs(shape: str, drafters: Sequence[str]) -> dict[str, str]:
    """The spec of each drafter by its name in the tables, the base alone first.

    Raises:
        ValueError: The shape is unknown, or a drafter is named twice or makes no sense here.
    """
    if shape not in SHAPES:
        raise ValueError(f"unknown shape {shape!r}: known are {', '.join(SHAPES)}")
    specs = drafter_specs.labels([NONE, *(spec for spec in drafters if spec != NONE)])
    if skipping := [spec for spec in specs.values() if drafter_specs.split(spec)[0] == "self_speculative"]:
        raise ValueError(f"{skipping[0]} would skip layers that were added and do nothing: leave it out")
    return specs


def decode(
    base: Base,
    drafters: Mapping[str, Drafter],
    specs: Mapping[str, str],
    questions: list[Question],
    max_new_tokens: int,
    repeats: int,
    title: str,
) -> dict[str, list[list[Answer]]]:
    """Answer all questions with all drafters, which alternate; the answers by drafter and repeat."""
    runner = Runner(base)
    sessions = {
        name: Session(runner, Budgeted(each) if drafter_specs.is_auto(specs[name]) else each)
        for name, each in drafters.items()
    }
    answers: dict[str, list[list[Answer]]] = {name: [[] for _ in range(repeats)] for name in drafters}
    with progress_bars(transient=True) as bars:
        task = bars.add_task(title, total=repeats * len(questions) * len(drafters))
        for repeat in range(repeats):
            numbered = dict(enumerate(questions))
            for _, answer in answer_questions(base, sessions, numbered, TEMPLATE, max_new_tokens, repeat=repeat):
                answers[answer.drafter][repeat].append(answer)
                bars.advance(task)
    return answers


def write_results(folder: Path, result: Mapping[str, Any], answers: Mapping[str, Sequence[Sequence[Answer]]]) -> None:
    """Write a run, and the tables and the plot of all runs in the folder."""
    name = f"{Path(result['base']).name}-{result['shape']}-{result['dtype']}"
    write_text(folder / f"{name}.json", json.dumps(result, indent=1) + "\n")
    typical = {drafter: median_answers(own) for drafter, own in answers.items()}
    summaries = {drafter: metrics.summarise(own, typical[NONE]) for drafter, own in typical.items()}
    phases = plots.draw("phases", summaries, plots.choose_colours(summaries.values()))
    (folder / f"{name}-phases.png").write_bytes(phases)
    results: list[Any] = [read_json(path) for path in sorted(folder.glob("*.json"))]
    parts = []
    for each in results:
        parts += ["\n".join(f"- {key}: `{value}`" for key, value in each["origin"].items())]
        parts += [table.markdown() for table in tables(each)]
    write_text(folder / "at_scale.md", "\n\n".join(parts) + "\n")
    plot_scaling(results, folder / "speedup_by_parameters.png")


def _make(spec: str, runner: Runner) -> Drafter:
    """Build a drafter; `decode` adds the automatic budget that its spec may ask for."""
    drafter = drafter_specs.make(spec, runner)
    return drafter.drafter if isinstance(drafter, Budgeted) else drafter


def _wide(spec: str, drafter: Drafter, small: Base, runner: Runner) -> Drafter:
    """The drafter of the wide base: a learned one is widened, also in a merged one, and any other is made anew."""
    if not isinstance(drafter, LearnedDrafter | Merged):
        return _make(spec, runner)
    init_args = checkpoint.read_config(Path(str(drafter_specs.split(spec)[1]))).init_args
    if isinstance(drafter, LearnedDrafter):
        return widen_drafter(drafter, init_args, small.shape, runner.base)
    merged = cast(Merged, _make(spec, Runner(small)))  # anew, as the first one knows the texts by now
    merged.learned = widen_drafter(merged.learned, init_args, small.shape, runner.base)
    return merged


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def _num_parameters(module: object) -> int:
    module = module.learned if isinstance(module, Merged) else module
    return sum(weight.numel() for weight in module.parameters()) if isinstance(module, torch.nn.Module) else 0
