"""``drafters report``: pages of evaluations, and the figures of other people's answer files recounted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.tokenizer import load_tokenizer
from inference.reporting import recount
from inference.reporting.answer_viewer import Decode
from inference.reporting.page import said, write_page, write_report
from inference.reporting.tables import COUNTING_RULE, Summaries, counted, markdown, table
from inference.results import answer_files
from inference.results.folders import Run, read_all
from inference.runs.outputs import folder_above

__all__ = ["markdown", "report", "table", "write_page", "write_report", "write_results"]


def report(
    folders: list[str] | None = None,
    answers: list[str] | None = None,
    baseline: str | None = None,
    tokenizer: str | None = None,
    out: str | None = None,
    overwrite: bool = False,
) -> None:
    """Make a page of what `drafters eval --out` left in one or several folders, or recount recorded answers.

    Folders become one HTML page that needs nothing but itself, its plots as PNG and its tables as Markdown. What ran
    under the same conditions on the same questions shares tables and plots; other folders stand side by side.

    With --answers and --baseline it reads answer files of FastChat's form, such as those of EAGLE, Spec-Bench and the
    original CTC-drafter, and prints their figures by every convention.

    Args:
        folders: Folders that drafters eval wrote, one after the other.
        answers: Recorded answers, JSONL; may be repeated.
        baseline: Recorded answers of the base alone, to the same questions.
        tokenizer: Folder of the base's tokenizer, which cuts answers into steps; the base's own unless it has moved.
        out: Folder for the page, or for recount.md and recount.json; one folder's page is made in it otherwise.
        overwrite: Replace a page that is already there.
    """
    if bool(folders) == bool(answers) or (baseline is None) != (answers is None):
        raise ValueError("give folders that drafters eval wrote, or --answers FILE and --baseline FILE")
    if answers:
        _recount(answers, baseline, out, overwrite)
    else:
        _report(folders, tokenizer, out, overwrite)


def write_results(folder: str | Path, summaries: Summaries, context: Mapping[str, Any]) -> Path:
    """Write every number to ``results.json``."""
    path = Path(folder) / "results.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {benchmark: {name: asdict(s) for name, s in by.items()} for benchmark, by in summaries.items()}
    record = {"context": counted(context), "results": found}
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
    return path


def _report(folders: Sequence[str], tokenizer: str | None, out: str | None, overwrite: bool) -> None:
    from rich.console import Console

    if out is None and len(folders) > 1:
        raise ValueError("the page of several folders needs a place: give --out FOLDER")
    folder = Path(folders[0]) if out is None else _new(out, "report.html", overwrite)
    runs = read_all(folders)
    parts = [(run, decoder(run, tokenizer)) for run in runs]
    console = Console()
    for run in runs:
        if len(runs) > 1:
            console.rule(run.name)
        for part in table(run.summaries):
            console.print(part)
        for line in said(run, "left_out"):
            console.print(f"left out: {line}", markup=False, highlight=False)
        for line in said(run, "warnings"):
            console.print(f"Warning: {line}.", style="yellow")
    console.print(COUNTING_RULE, style="dim")
    page = write_page(folder, parts)
    titles = [f"# {run.name}\n\n" if len(runs) > 1 else "" for run in runs]
    texts = [title + markdown(run.summaries, run.context) for title, run in zip(titles, runs, strict=True)]
    (folder / "results.md").write_text("\n".join(texts), encoding="utf-8")
    console.print(f"Report: {page}")


def _recount(paths: Sequence[str], baseline: str, out: str | None, overwrite: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    folder = None if out is None else _new(out, "recount.json", overwrite)
    base = answer_files.read(baseline)
    pairs = {path: recount.pair(answer_files.read(path), base) for path in paths}
    console = Console()
    for path, found in pairs.items():
        console.print(Text(f"{path}\nbeside {baseline}", style="bold"), Text(), *recount.table(found), sep="\n")
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        texts = [f"## {Path(path).name}\n\n{recount.markdown(found)}" for path, found in pairs.items()]
        (folder / "recount.md").write_text("\n".join(texts), encoding="utf-8")
        told = {path: recount.figures(found) for path, found in pairs.items()}
        text = json.dumps({"baseline": baseline, "answers": told}, indent=2, ensure_ascii=False)
        (folder / "recount.json").write_text(text + "\n", encoding="utf-8")


def decoder(run: Run, tokenizer: str | None = None) -> Decode | None:
    """What turns a run's tokens into text: of the given tokenizer or the base's own; None unless it fits the texts.

    Raises:
        ValueError: The given tokenizer cannot be loaded.
    """
    try:
        decode = load_tokenizer(tokenizer or str(run.conditions.get("base", ""))).decode
    except ValueError:
        if tokenizer:
            raise
        return None
    answered = [own[0] for by_drafter in run.answers.values() for own in by_drafter.values()]
    turns = [turn for answer in answered for turn in answer.turns]
    fits = all(decode(turn.token_ids, skip_special_tokens=True).strip() == turn.text for turn in turns)
    return decode if fits else None


def _new(out: str, name: str, overwrite: bool) -> Path:
    path = Path(out) / name
    folder_above(path)
    if path.exists() and not overwrite:
        raise ValueError(f"{path} is already there: give another --out, or --overwrite to replace it")
    return Path(out)
