"""``drafters sweep``: measure a drafter over a grid of its arguments, each cell next to plain decoding."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from data.benchmarks import Question
from data.files import SafeConsole, validated
from data.tokenizer import short_hash
from inference import drafter_specs
from inference.evaluation.answering import answer_questions
from inference.evaluation.question_options import QuestionOptions
from inference.fingerprint import fingerprint
from inference.journal import Journal
from inference.outputs import folder_above
from inference.progress import progress_bars
from inference.prompts import BenchmarkPrompts
from inference.results import folders, metrics
from inference.results.records import Answer
from inference.tuning import sweep_plots, sweep_report
from inference.tuning.grid import Cell, cells, read_axes, refuse_mistakes
from inference.tuning.sweep_report import MeasuredCell
from inference.verifier.base import Base
from inference.verifier.options import ModelOptions, SamplingOptions
from inference.verifier.runner import Runner
from inference.verifier.sampling import Greedy, KeyedSampler


@dataclass(frozen=True)
class Workload:
    """What is decoded at every cell of a sweep, and how.

    Args:
        runner: Runs the base.
        sampler: Chooses the tokens.
        prompts: The questions and their prompts.
        options: How the questions are put to the base.
    """

    runner: Runner
    sampler: Greedy | KeyedSampler
    prompts: BenchmarkPrompts
    options: QuestionOptions


def sweep(
    model: ModelOptions,
    selection: QuestionOptions,
    sampling: SamplingOptions,
    drafter: str,
    grid: list[str],
    out: str,
    overwrite: bool = False,
) -> None:
    """Measure a drafter at every point of a grid over its arguments, question by question next to plain decoding.

    Writes sweep.json, sweep.md and the heat maps acceptance_length.png and speedup.png, which show two axes each, with
    one map for each combination of the other axes. If the command is interrupted, repeat it to continue; with a larger
    grid it measures only the new cells. For Ouroboros, `drafters ouroboros-search` visits only a part of the grid, as
    Algorithm 1 of its paper does.

    Args:
        model: The base.
        selection: The questions.
        sampling: How the tokens are chosen.
        drafter: NAME[=FILE][:key=value,...], the part that all cells have in common; an unknown name lists all names.
        grid: An axis, such as order=2..6 or num_draft=3,5,7. The axis file varies the FILE in NAME=FILE. May be
            repeated.
        out: Folder for the results; cells that it already holds, of this grid or another, are not measured again.
        overwrite: Start over, whatever the folder holds.
    """
    folder = Path(out)
    axes = read_axes(grid, drafter)
    all_cells = cells(drafter, axes)
    questions = selection.load()
    folder_above(folder / "cells.jsonl")  # raises ValueError if the folder cannot be made
    base = model.load()
    workload = Workload(Runner(base), sampling.sampler(), selection.select(base, questions), selection)
    errors = build_errors(all_cells, workload.runner)
    refuse_mistakes(axes, all_cells, errors)
    notes = [*workload.prompts.notes(), *(f"{cell.spec}: {error}" for cell, error in errors.items())]
    print_lines([f"left out: {note}" for note in notes], style="yellow")
    settings = recorded_settings(model, sampling, workload)
    path = folder / "cells.jsonl"
    with Journal(path, settings, existing="replace_if_different" if overwrite else "continue") as journal:
        try:
            measured = measure([cell for cell in all_cells if cell not in errors], journal, workload)
        except KeyboardInterrupt:
            print("\nstopped: repeat the command to continue", file=sys.stderr)
            raise SystemExit(130) from None
    context = {
        **settings,
        "drafter": drafter,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": " ".join(["drafters", *sys.argv[1:]]),
        "noise": round(sweep_report.noise(measured), 4),
        "left_out": {cell.spec: str(error) for cell, error in errors.items()},
        "left_out_questions": "; ".join(workload.prompts.notes()),
    }
    sweep_report.write(folder, axes, measured, context)
    for metric in sweep_plots.METRICS:
        maps = sweep_plots.panels(axes, {each.cell.place: each.summary[metric] for each in measured})
        sweep_plots.draw(metric, drafter_specs.label(drafter), maps, folder / f"{metric}.png")
    SafeConsole().print(sweep_report.table(axes, measured))
    print_lines([*sweep_report.conclusions(measured), f"All {len(measured)} cells: {folder / 'sweep.md'}"])


def build_errors(all_cells: Sequence[Cell], runner: Runner) -> dict[Cell, ValueError]:
    """Return the cells whose drafter cannot be built, and why; nothing is decoded yet."""
    errors = {}
    for cell in all_cells:
        try:
            drafter_specs.make(cell.spec, runner)
        except ValueError as error:
            errors[cell] = error
    return errors


def _asked(question: Question) -> list[Any]:
    """What is asked; system prompt and tools only where there are any: older sweeps are still continued."""
    more = [part for part in (question.system, question.tools) if part]
    return [question.question_id, question.turns, *more]


def recorded_settings(model: ModelOptions, sampling: SamplingOptions, workload: Workload) -> dict[str, Any]:
    """Everything that the measurements depend on besides the cell, for the journal and the results."""
    options, questions = workload.options, workload.prompts.questions
    return {
        "format": 1,
        "base": model.base,
        "base_files": fingerprint(model.base),
        "benchmark": f"{options.benchmark}, {len(questions)} questions",
        "questions": short_hash(json.dumps([_asked(each) for each in questions])),
        "template": options.template,
        "decoding": [options.max_new_tokens, sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed],
        "dtype": model.dtype,
        "device": _device(workload.runner.base),
    }


def _fingerprint(cell: Cell) -> str:
    file = drafter_specs.split(cell.spec)[1]
    return fingerprint(file and drafter_specs.drafter_folder(file))


def measure(grid: Sequence[Cell], journal: Journal, workload: Workload) -> list[MeasuredCell]:
    """Measure the cells that are not in the journal, add them to it, and return all cells in the order of ``grid``."""
    identities = {cell: (cell.spec, _fingerprint(cell)) for cell in grid}
    known = {(entry["spec"], entry["files"]): entry for entry in journal.entries(_read_cell)}
    num_missing = sum(identity not in known for identity in identities.values())
    measured = []
    with progress_bars() as progress:
        task = progress.add_task("answers", total=2 * len(workload.prompts.questions) * num_missing)
        for number, (cell, identity) in enumerate(identities.items(), start=1):
            if identity not in known:
                summary, base_speed = measure_cell(cell, workload, lambda: progress.advance(task))
                known[identity] = {
                    "spec": identity[0],
                    "files": identity[1],
                    "summary": asdict(summary),
                    "alone": base_speed,
                }
                journal.append(known[identity])
                if not sys.stderr.isatty():
                    numbers = sweep_report.headline(known[identity]["summary"])
                    print(f"{number} of {len(grid)}: {cell.spec}: {numbers}", file=sys.stderr)
            measured.append(MeasuredCell(cell, known[identity]["summary"], known[identity]["alone"]))
    return measured


def _read_cell(entry: dict[str, Any]) -> dict[str, Any]:
    entry["summary"] = asdict(folders.summary_from_json(entry["summary"]))  # ValueError or KeyError if it is damaged
    _, _, entry["alone"] = validated(tuple[str, str, float], (entry["spec"], entry["files"], entry["alone"]))
    return entry


def measure_cell(cell: Cell, workload: Workload, advance: Callable[[], object]) -> tuple[metrics.Summary, float]:
    """Decode the questions with and without the cell's drafter, alternating as in `drafters eval`.

    Returns:
        The drafter's numbers, and the tokens per second of plain decoding.
    """
    runner, options = workload.runner, workload.options
    sessions = {spec: drafter_specs.make_session(spec, runner, workload.sampler) for spec in ("none", cell.spec)}
    by_drafter: dict[str, list[Answer]] = {name: [] for name in sessions}
    questions = workload.prompts.questions
    for answer in answer_questions(runner.base, sessions, questions, options.template, options.max_new_tokens):
        by_drafter[answer.drafter].append(answer)
        advance()
    plain = metrics.summarise(by_drafter["none"], by_drafter["none"])
    assert plain.tokens_per_second is not None  # every question takes some time
    return metrics.summarise(by_drafter[cell.spec], by_drafter["none"]), plain.tokens_per_second


def print_lines(lines: Sequence[str], style: str | None = None) -> None:
    """Print lines as they are, without wrapping or markup."""
    console = SafeConsole()
    for line in lines:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def _device(base: Base) -> str:
    device = base.model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return f"{device.type} ({name}, {torch.get_num_threads()} threads)"
