"""``drafters sweep``: a drafter over a grid of its arguments, each cell beside the base alone."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from data import benchmarks
from data.benchmarks import Question
from data.tokenizer import short_hash
from drafters.atomic_write import atomic_write
from inference.api.prompts import fitting
from inference.engine.base import Base, Dtype, load_base, resolve_device
from inference.engine.runner import Runner
from inference.engine.sampling import make_sampler
from inference.engine.session import Session
from inference.evaluation.answering import answers
from inference.registry import catalogue
from inference.reporting.tables import number
from inference.results import metrics
from inference.runs.journal import Journal
from inference.runs.outputs import folder_above
from inference.tuning import sweep_plots
from inference.tuning.grid import Axis, Cell, cells, read_axes, refuse_mistakes

COLUMNS = {
    "acceptance length": lambda found: number(found["acceptance_length"]),
    "speed-up": lambda found: number(found["speedup"], unit="×"),
    "its noise": lambda found: "–" if found["noise"] is None else f"± {found['noise']:.0%}",
    "tokens/s": lambda found: number(found["tokens_per_second"], places=1),
    "fed tokens/step": lambda found: number(found["fed_per_step"], places=1),
    "identical": lambda found: f"{found['identical']}/{found['questions']}",
}
MAX_SHOWN = 20  # cells in the terminal


@dataclass(frozen=True)
class Measured:
    """A cell and what was found there.

    Args:
        cell: Place and drafter.
        summary: The numbers of a `metrics.Summary`, by name.
        alone: Tokens per second of the base alone, run beside it.
    """

    cell: Cell
    summary: dict[str, Any]
    alone: float


def sweep(
    base: str,
    drafter: str,
    grid: list[str],
    out: str,
    benchmark: str = "embedded",
    questions: str | None = None,
    offset: int = 0,
    limit: int | None = 5,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    template: str = "tokenizer",
    dtype: Dtype = "float32",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    overwrite: bool = False,
) -> None:
    """Measure a drafter at every place of a grid over its arguments, question by question beside the base alone.

    Stopped, the same command goes on; with a larger grid it measures only what is new. Writes sweep.json, sweep.md and
    the heat maps acceptance_length.png and speedup.png: two axes a map, a map for each choice of further ones. Of
    Ouroboros' grid `drafters ouroboros-search` visits a part only, as Algorithm 1 of its paper does.

    Args:
        base: Folder or hub id of the base.
        drafter: NAME[=FILE][:key=value,...], what all cells have in common; a wrong name lists all.
        grid: An axis, such as order=2..6 or num_draft=3,5,7; the axis file is what NAME=FILE names. May be repeated.
        out: Folder for the results; what it holds of the same grid, or of another, is not measured again.
        benchmark: Whose questions are decoded, as in `drafters eval`; a wrong name lists all.
        questions: Local file of the benchmark, where it is not to come from the hub.
        offset: Leave out the first questions.
        limit: Questions at most; those that do not fit into the base's context are left out and not counted.
        max_new_tokens: Tokens of an answer at most.
        temperature: 0 decodes greedily, above it samples, each draw keyed by the seed and its position.
        top_k: Sampling keeps the k most probable tokens; 0 keeps all.
        top_p: Sampling keeps the most probable tokens up to this probability.
        seed: Of the sampling.
        template: Chat template: the tokenizer's own, vicuna_v1.1 or llama2_chat.
        dtype: Number format of base and drafters.
        device: auto takes the GPU where there is one.
        overwrite: Begin anew, whatever the folder holds.
    """
    axes, folder = read_axes(grid, drafter), Path(out)
    benchmarks.check_selection(offset, limit)
    chosen, every = benchmarks.load(benchmark, questions, offset), cells(drafter, axes)
    folder_above(folder / "cells.jsonl")
    loaded = load_base(base, dtype, resolve_device(device))
    asked = fitting(loaded, benchmark, chosen, template, max_new_tokens, limit)
    runner, sampler = Runner(loaded), make_sampler(temperature, top_k, top_p, seed)
    console = Console()
    errors = unfit(every, runner)
    refuse_mistakes(axes, every, errors)
    for line in [*asked.notes(), *(f"{cell.spec}: {error}" for cell, error in errors.items())]:
        console.print(f"left out: {line}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    fit = [cell for cell in every if cell not in errors]
    work = {
        "format": 1,
        "base": base,
        "base_files": stamp(base),
        "benchmark": f"{benchmark}, {len(asked.questions)} questions",
        "questions": short_hash(json.dumps([[each.question_id, each.turns] for each in asked.questions])),
        "template": template,
        "decoding": [max_new_tokens, temperature, top_k, top_p, seed],
        "dtype": dtype,
        "device": _device(loaded),
    }
    with Journal(folder / "cells.jsonl", work, existing="replace_if_different" if overwrite else "continue") as journal:
        try:
            found = measure(fit, journal, runner, sampler, asked.questions, template, max_new_tokens)
        except KeyboardInterrupt:
            print("\nstopped: the same command goes on", file=sys.stderr)
            raise SystemExit(130) from None
    context = {
        **work,
        "drafter": drafter,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": " ".join(["drafters", *sys.argv[1:]]),
        "noise": round(noise(found), 4),
        "left_out": {cell.spec: str(error) for cell, error in errors.items()},
        "left_out_questions": "; ".join(asked.notes()),
    }
    write(folder, axes, found, context)
    for metric in sweep_plots.METRICS:
        maps = sweep_plots.panels(axes, {one.cell.place: one.summary[metric] for one in found})
        sweep_plots.draw(metric, catalogue.label(drafter), maps, folder / f"{metric}.png")
    console.print(_table(axes, ranked(found, "speedup")[:MAX_SHOWN]))
    for line in conclusions(found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"All {len(found)} cells: {folder / 'sweep.md'}", markup=False, highlight=False, soft_wrap=True)


def unfit(every: Sequence[Cell], runner: Runner) -> dict[Cell, ValueError]:
    """The cells whose drafter cannot be built, and why; asked before anything is decoded."""
    errors = {}
    for cell in every:
        try:
            catalogue.make(cell.spec, runner)
        except ValueError as error:
            errors[cell] = error
    return errors


def measure(
    fit: Sequence[Cell],
    journal: Journal,
    runner: Runner,
    sampler: Any,
    asked: list[Question],
    template: str,
    max_new_tokens: int,
) -> list[Measured]:
    """Measure what the journal does not hold, and return all, in the order of ``fit``.

    A cell's drafter and the base alone take turns, as in `drafters eval`; a cell is written down when it is whole.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    known = {(line["spec"], line["files"]): line for line in journal}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    found = []
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        left = [cell for cell in fit if (cell.spec, stamp(catalogue.split(cell.spec)[1])) not in known]
        task = progress.add_task("answers", total=2 * len(asked) * len(left))
        for index, cell in enumerate(fit, 1):
            key = (cell.spec, stamp(catalogue.split(cell.spec)[1]))
            if key not in known:
                drafters = {"none": catalogue.make("none", runner), cell.spec: catalogue.make(cell.spec, runner)}
                sessions = {name: Session(runner, each, sampler) for name, each in drafters.items()}
                given = {name: [] for name in sessions}
                for answer in answers(runner.base, sessions, asked, template, max_new_tokens):
                    given[answer.drafter].append(answer)
                    progress.advance(task)
                summary = metrics.summarise(given[cell.spec], given["none"])
                alone = metrics.summarise(given["none"], given["none"])
                line = {"spec": key[0], "files": key[1], "summary": asdict(summary), "alone": alone.tokens_per_second}
                journal.append(line)
                known[key] = line
                if not sys.stderr.isatty():
                    print(f"{index} of {len(fit)}: {cell.spec}: {_numbers(line['summary'])}", file=sys.stderr)
            found.append(Measured(cell, known[key]["summary"], known[key]["alone"]))
    return found


def stamp(name: str | None) -> str:
    """Of what state the files of a folder are, or a file, so that another drafter of the same name is not taken for
    the one that was measured; empty where there are none."""
    path = Path(name or "")
    if not name or not path.exists():
        return ""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return short_hash(json.dumps(sorted([str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files)))


def ranked(found: Sequence[Measured], metric: str) -> list[Measured]:
    """Best first; cells without the number last."""
    return sorted(found, key=lambda one: -(one.summary[metric] or 0.0))


def noise(found: Sequence[Measured]) -> float:
    """Spread of the base's own speed over the cells, largest to smallest as a share of the smallest.

    It is the same work every time: what differs is the machine.
    """
    speeds = [one.alone for one in found]
    return max(speeds) / min(speeds) - 1


def conclusions(found: Sequence[Measured]) -> list[str]:
    """What a reader takes home."""
    lines = []
    for title, metric in (("fastest", "speedup"), ("longest acceptance", "acceptance_length")):
        best = ranked(found, metric)[0]
        lines.append(f"{title}: {best.cell.spec} ({_numbers(best.summary)})")
    if len(found) > 1:
        lines.append(f"The base alone ran up to {noise(found):.0%} faster beside one cell than beside another.")
    different = sum(one.summary["identical"] < one.summary["questions"] for one in found)
    if different:
        lines.append(f"In {different} of {len(found)} cells an answer is not the one the base writes alone.")
    return lines


def write(folder: Path, axes: Sequence[Axis], found: Sequence[Measured], context: dict[str, Any]) -> None:
    """Write ``sweep.json`` and ``sweep.md``."""
    record = {"context": context, "axes": [asdict(axis) for axis in axes]}
    record["cells"] = [asdict(one.cell) | {"alone": one.alone, **one.summary} for one in found]
    lines = [*(f"- {line}" for line in conclusions(found)), ""]
    for title, metric in (("speed-up", "speedup"), ("acceptance length", "acceptance_length")):
        headings = [axis.name for axis in axes] + list(COLUMNS)
        rows = [headings, ["---"] * len(axes) + ["---:"] * len(COLUMNS), *_rows(ranked(found, metric))]
        lines += [f"## By {title}", "", *("| " + " | ".join(_escape(row)) + " |" for row in rows), ""]
        lines += [f"![{title}]({metric}.png)", ""]
    lines += ["## What was run", "", *(f"- {key}: {value}" for key, value in context.items()), ""]
    with atomic_write(folder / "sweep.json") as new, atomic_write(folder / "sweep.md") as new_page:
        new.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        new_page.write_text("\n".join(lines), encoding="utf-8")


def _rows(found: Sequence[Measured]) -> list[list[str]]:
    return [[*one.cell.place, *(column(one.summary) for column in COLUMNS.values())] for one in found]


def _table(axes: Sequence[Axis], found: Sequence[Measured]) -> Table:
    longest = ranked(found, "acceptance_length")[0]
    title = f"the {len(found)} fastest cells; in bold, the longest acceptance among them"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in [*(axis.name.replace("_", "_\n", 1) for axis in axes), *COLUMNS]:
        table.add_column(heading.replace(" ", "\n", 1), justify="right" if heading in COLUMNS else "left")
    for one, row in zip(found, _rows(found), strict=True):
        row[: len(axes)] = map(sweep_plots.short, one.cell.place)
        table.add_row(*row, style="bold" if one is longest else None)
    return table


def _numbers(summary: dict[str, Any]) -> str:
    return f"acceptance length {number(summary['acceptance_length'])}, speed-up {number(summary['speedup'], unit='×')}"


def _escape(row: Sequence[str]) -> list[str]:
    return [cell.replace("|", "\\|") for cell in row]


def _device(base: Base) -> str:
    device = base.model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return f"{device.type} ({name}, {torch.get_num_threads()} threads)"
