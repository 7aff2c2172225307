"""``drafters report``: pages of evaluations, and answer files of other projects counted by every convention."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from data.files import SafeConsole, escape_markdown, write_text
from data.templates import decode_answer
from data.tokenizer import load_tokenizer
from inference.outputs import folder_above
from inference.reporting import comparison_table, conventions
from inference.reporting.answer_viewer import Decode
from inference.reporting.exports import Format, export, latex_table, latex_tables, summary_records
from inference.reporting.page import context_lines, write_page, write_report
from inference.reporting.rows import rich_table
from inference.reporting.tables import COUNTING_RULE, Summaries, markdown, table, with_counting_rule
from inference.results import answer_files, comparison
from inference.results.folders import EvaluationResults, read, read_all

__all__ = ["markdown", "report", "table", "write_page", "write_report", "write_results"]


def report(
    folders: list[str] | None = None,
    answers: list[str] | None = None,
    baseline: str | None = None,
    tokenizer: str | None = None,
    out: str | None = None,
    overwrite: bool = False,
    compare: bool = False,
    format: list[Format] | None = None,
) -> None:
    """Make one page of several evaluations, compare two, or count recorded answers by every convention.

    Folders of `drafters eval --out` become one self-contained HTML page, with its plots as PNG files and its tables in
    Markdown. Evaluations with the same conditions and questions share their tables and plots; the others are shown one
    after the other.

    With --compare, two folders are compared question by question: acceptance length and speed-up of each drafter, with
    intervals of their change. The exit code is 1 if there is a regression, or if the second folder lacks a benchmark, a
    drafter or an answer of the first one, so that a script notices what was not compared.

    With --answers and --baseline, the command reads answer files in FastChat's form, such as those of EAGLE, Spec-Bench
    and the original CTC-drafter, and prints their acceptance lengths and speed-ups by every counting convention.

    Args:
        folders: Folders that `drafters eval --out` wrote, one after the other.
        answers: JSONL file of recorded answers; may be repeated.
        baseline: JSONL file of the base's own answers to the same questions.
        tokenizer: Folder of the base's tokenizer, which is needed to show the steps of an answer; by default that of
            the base, which must not have moved.
        out: Folder for the page, for comparison.md and comparison.json, or for recount.md and recount.json; by default
            the page of one folder is written into that folder.
        overwrite: Replace a page or file that is already there.
        compare: Compare the second folder with the first.
        format: Write the numbers of the page, or of the comparison, also as csv, parquet or latex; may be repeated.
    """
    if compare and (not folders or len(folders) != 2 or answers or baseline is not None):
        raise ValueError("--compare takes two folders that drafters eval wrote: first the old one, then the new one")
    if format and not folders:
        raise ValueError("--format is for folders that drafters eval wrote: give one")
    if format and compare and out is None:
        raise ValueError("--format with --compare writes files: give --out FOLDER")
    if folders and compare:
        _compare(folders, out, overwrite, format or [])
    elif folders and not answers and baseline is None:
        _report(folders, tokenizer, out, overwrite, format or [])
    elif answers and not folders and baseline is not None:
        _count(answers, baseline, out, overwrite)
    else:
        raise ValueError("give folders that drafters eval wrote, or --answers FILE and --baseline FILE")


def write_results(
    folder: str | Path,
    summaries: Summaries,
    context: Mapping[str, Any],
    benchmarks: Mapping[str, Mapping[str, Any]] | None = None,
) -> Path:
    """Write all numbers to ``results.json`` and return its path.

    Args:
        folder: The folder to write to.
        summaries: The summaries, by benchmark and drafter.
        context: What was run.
        benchmarks: What makes results comparable, by benchmark: see `EvaluationResults`.
    """
    path = Path(folder) / "results.json"
    results = {benchmark: {name: asdict(s) for name, s in by.items()} for benchmark, by in summaries.items()}
    content = {"context": with_counting_rule(context), "benchmarks": benchmarks or {}, "results": results}
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n")
    return path


def decoder(results: EvaluationResults, tokenizer: str | None = None) -> Decode | None:
    """Return the function that turns the token ids of an evaluation into text; None if no tokenizer reproduces it.

    Args:
        results: The evaluation.
        tokenizer: Folder of the tokenizer; by default that of the base.

    Raises:
        ValueError: The given tokenizer cannot be loaded.
    """
    try:
        reader = load_tokenizer(tokenizer or str(results.conditions.get("base", "")))
    except ValueError:
        if tokenizer:
            raise
        return None
    first_answers = [answers[0] for by_drafter in results.answers.values() for answers in by_drafter.values()]
    turns = [turn for answer in first_answers for turn in answer.turns]
    fits = all(decode_answer(turn.token_ids, reader).strip() == turn.text for turn in turns)
    decode: Any = reader.decode
    return decode if fits else None


def _report(
    folders: Sequence[str], tokenizer: str | None, out: str | None, overwrite: bool, formats: Sequence[Format]
) -> None:
    if out is None and len(folders) > 1:
        raise ValueError("the page of several folders needs a folder of its own: give --out FOLDER")
    folder = Path(folders[0]) if out is None else _new_folder(out, "report.html", overwrite)
    evaluations = read_all(folders)
    parts = [(results, decoder(results, tokenizer)) for results in evaluations]
    console = SafeConsole()
    for results in evaluations:
        if len(evaluations) > 1:
            console.rule(Text(results.name))
        for part in table(results.summaries):
            console.print(part)
        for line in context_lines(results, "left_out"):
            console.print(f"left out: {line}", markup=False, highlight=False)
        for line in context_lines(results, "warnings"):
            console.print(f"Warning: {line}.", style="yellow", markup=False)
    console.print(COUNTING_RULE, style="dim")
    page = write_page(folder, parts)
    titles = [f"# {escape_markdown(results.name)}\n\n" if len(evaluations) > 1 else "" for results in evaluations]
    texts = [
        title + markdown(results.summaries, results.context) for title, results in zip(titles, evaluations, strict=True)
    ]
    write_text(folder / "results.md", "\n".join(texts))
    latex = "\n".join(latex_tables(results.summaries) for results in evaluations)
    export(folder, "results", formats, summary_records(evaluations), latex)
    print(f"Report: {page}")


def _compare(folders: Sequence[str], out: str | None, overwrite: bool, formats: Sequence[Format]) -> None:
    folder = None if out is None else _new_folder(out, "comparison.json", overwrite)
    before, after = map(read, folders)
    differences = comparison.compare(before, after)
    conditions = comparison.differing_conditions(before, after)
    unpaired = comparison.unpaired(before, after)
    console = SafeConsole()
    headings, rows = comparison_table.difference_rows(differences)
    for benchmark in dict.fromkeys(each.benchmark for each in differences):
        own = [row for row in rows if row.cells[0] == benchmark]
        console.print(Text(f"{benchmark}, {own[0].cells[3]} questions", style="bold"))
        console.print(rich_table(headings, own, comparison_table.TERMINAL_COLUMNS))
    console.print(comparison_table.NOTE, style="dim")
    for line in conditions:
        console.print(f"Warning: the evaluations differ in {line}.", style="yellow", markup=False)
    for line in unpaired.before:
        console.print(f"Missing in {folders[1]}: {line}.", style="red", markup=False, highlight=False)
    for line in unpaired.after:
        console.print(f"Only in {folders[1]}: {line}.", style="yellow", markup=False, highlight=False)
    if unpaired.before:
        console.print("What is missing was not compared, so the exit code is 1.", style="red")
    if folder:
        records = comparison_table.records(differences)
        content = {"before": str(folders[0]), "after": str(folders[1]), "conditions": conditions}
        content |= {"only_before": unpaired.before, "only_after": unpaired.after}
        text = json.dumps(content | {"differences": records}, indent=2, ensure_ascii=False)
        names = [escape_markdown(folder) for folder in folders[::-1]]
        write_text(folder / "comparison.md", comparison_table.markdown(names, differences, conditions, unpaired))
        export(folder, "comparison", formats, records, latex_table(headings, rows))
        write_text(folder / "comparison.json", text + "\n")
    if unpaired.before or any(each.verdict == "regression" for each in differences):
        sys.exit(1)


def _count(paths: Sequence[str], baseline: str, out: str | None, overwrite: bool) -> None:
    folder = None if out is None else _new_folder(out, "recount.json", overwrite)
    base = answer_files.read(baseline)
    pairs = {path: conventions.pair(answer_files.read(path), base) for path in paths}
    console = SafeConsole()
    for path, own in pairs.items():
        title = Text(f"{path}\ncompared with {baseline}", style="bold")
        console.print(title, Text(), *conventions.table(own), sep="\n")
    if folder:
        texts = [f"## {escape_markdown(Path(path).name)}\n\n{conventions.markdown(own)}" for path, own in pairs.items()]
        content = {"baseline": baseline, "answers": {path: conventions.figures(own) for path, own in pairs.items()}}
        write_text(folder / "recount.md", "\n".join(texts))
        write_text(folder / "recount.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _new_folder(out: str, name: str, overwrite: bool) -> Path:
    """Return the folder ``out``, in which the file ``name`` will be written."""
    path = Path(out) / name
    folder_above(path)
    if path.exists() and not overwrite:
        raise ValueError(f"{path} is already there: give another --out, or --overwrite to replace it")
    return Path(out)
