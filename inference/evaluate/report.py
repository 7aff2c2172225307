"""``drafters report``: pages of evaluations, two evaluations compared, and published answers counted again."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas
from rich.text import Text

from data.files import atomic_write, write_text
from data.safe_text import SafeConsole, escape_markdown, safe_line
from inference import recount
from inference.evaluate import compare, tables
from inference.evaluate.page import find_decoder, write_page
from inference.evaluate.results import EvaluationResults, read, read_all
from inference.evaluate.tables import Row, Table, number
from inference.options import Format
from inference.runs import new_file


def report_folders(
    folders: Sequence[str], tokenizer: str | None, out: str | None, overwrite: bool, formats: Sequence[Format]
) -> None:
    """Write the page of some evaluations, and print their tables."""
    if out is None and len(folders) > 1:
        raise ValueError("the page of several folders needs a name: give --out PAGE")
    page = _new_page(out, formats, overwrite) or Path(folders[0]) / "report.html"
    evaluations, console = read_all(folders), SafeConsole()
    for results in evaluations:
        if len(evaluations) > 1:
            console.rule(Text(results.name))
        console.print(*tables.terminal(results), sep="\n")
    listed, text = [table for results in evaluations for table in tables.all_tables(results)], ""
    if len(evaluations) > 1:
        listed.insert(0, tables.evaluations_table(evaluations))
        text = listed[0].markdown() + "\n"
        console.rule()
        console.print(*listed[0].rich(), sep="\n")
    parts = [(results, find_decoder(results, tokenizer)) for results in evaluations]
    write_page(page, parts, None if out else page.parent / "plots")
    text += "\n".join(map(tables.markdown, evaluations))
    write_tables(page, formats, text, [table.latex() for table in listed], figure_rows(evaluations))
    print(f"Report: {page}")


def compare_folders(folders: Sequence[str], out: str | None, overwrite: bool, formats: Sequence[Format]) -> None:
    """Print how the second of two evaluations differs from the first, and exit with code 1 if it is worse."""
    page = _new_page(out, formats, overwrite)
    before, after = map(read, folders)
    differences = compare.compare(before, after)
    listed, missing = compare.difference_tables(differences), compare.unpaired(before, after)
    notes = [
        "Differences are paired by question. The intervals are simultaneous: two equal evaluations have anything "
        "marked in at most 5 % of cases. Not judged: fewer than 10 questions, or an unknown timing error."
    ]
    notes += [f"The evaluations differ in {line}." for line in compare.differing_conditions(before, after)]
    notes += [f"Missing in {folders[1]}: {line}." for line in missing]
    notes += [f"Only in {folders[1]}: {line}." for line in compare.unpaired(after, before)]
    if missing:
        notes.append("What is missing was not compared, so the exit code is 1.")
    console = SafeConsole()
    console.print(*(part for table in listed for part in table.rich()), sep="\n")
    console.print(*(Text(line, style="yellow" if at else "dim") for at, line in enumerate(notes)), sep="\n")
    if page:
        rows = [
            asdict(difference) | {"change": difference.change, "verdict": difference.verdict}
            for difference in differences
        ]
        title = f"# {escape_markdown(after.name)} compared with {escape_markdown(before.name)}\n"
        parts = [title, *(table.markdown() for table in listed), *(f"- {escape_markdown(line)}" for line in notes), ""]
        write_tables(page, formats, "\n".join(parts), [table.latex() for table in listed], rows)
    if missing or any(difference.verdict == "regression" for difference in differences):
        sys.exit(1)


def recount_files(
    paths: Sequence[str], baseline: str, out: str | None, overwrite: bool, formats: Sequence[Format]
) -> None:
    """Print what recorded answers are by every counting convention."""
    page = _new_page(out, formats, overwrite)
    base, listed, rows = recount.read(baseline), [], []
    for path in paths:
        pairs = recount.pair(recount.read(path), base)
        figures, (identical, turns) = recount.figures(pairs), recount.count_identical(pairs)
        lines = [Row([name, number(value), recount.CONVENTIONS[name][0]]) for name, value in figures.items()]
        note = f"identical turns: {identical} of {turns} ({100 * identical / turns:.1f} %)"
        listed.append(Table(path, ["figure", "value", "how it is counted"], lines, note))
        rows.append({"answers": path, **figures})
    for table in listed:
        SafeConsole().print(*table.rich(), Text(table.note), sep="\n")
    if page:
        text = "\n".join(table.markdown() for table in listed)
        write_tables(page, formats, text, [table.latex() for table in listed], rows)


# ---- files


def _new_page(out: str | None, formats: Sequence[Format], overwrite: bool) -> Path | None:
    """The page; raises ValueError if it, or a file beside it, is already there or cannot be made."""
    if out is None:
        return None
    page = new_file(out, overwrite)
    for kind in formats:
        new_file(str(table_path(page, kind)), overwrite)
    return page


def table_path(page: Path, kind: Format) -> Path:
    """The file of a format beside a page."""
    return page.with_suffix(".tex" if kind == "latex" else f".{kind}")


def write_tables(
    page: Path, formats: Sequence[Format], markdown: str, latex: Sequence[str], rows: Sequence[dict[str, Any]]
) -> None:
    """Write the tables and figures of a page beside it, with its name and the suffix of each format.

    The tables are given in Markdown and in LaTeX; ``rows`` of figures are for CSV and Parquet.
    """
    for kind in dict.fromkeys(formats):
        path = table_path(page, kind)
        if kind in ("md", "latex"):
            write_text(path, markdown if kind == "md" else "\n".join(latex))
        else:
            frame = pandas.DataFrame([_flat(row, kind == "csv") for row in rows])
            with atomic_write(path) as new:
                frame.to_csv(new, index=False) if kind == "csv" else frame.to_parquet(new, index=False)


def figure_rows(evaluations: Sequence[EvaluationResults]) -> list[dict[str, Any]]:
    """A row for each drafter on each benchmark of some evaluations: the conditions, and its figures by name.

    `write_tables` names the figures by their paths in results.json, and items of lists by their place:
    ``acceptance.rates.1.rate.value`` is the rate of the first position.
    """
    rows = []
    for results in evaluations:
        conditions = results.conditions
        shared = {"evaluation": results.name, "base": conditions.base, **conditions.same()}
        for benchmark, by_drafter in results.summaries.items():
            names = {**shared, "benchmark": benchmark, "max_new_tokens": conditions.caps.get(benchmark)}
            rows += [names | asdict(summary) for summary in by_drafter.values()]
    return rows


def _flat(value: Any, is_csv: bool, path: str = "") -> dict[str, Any]:
    """The figures in a value by their paths; in CSV, no text is a formula of a spreadsheet."""
    if isinstance(value, (list, tuple)):
        ends = ("low", "high") if path.endswith("interval") else range(1, len(value) + 1)
        value = dict(zip(ends, value, strict=True))
    if isinstance(value, dict):
        parts = [_flat(item, is_csv, f"{path}.{key}" if path else str(key)) for key, item in value.items()]
        return {key: item for part in parts for key, item in part.items()}
    if isinstance(value, str):
        value = "'" * (is_csv and value.lstrip().startswith(("=", "+", "-", "@"))) + safe_line(value)
    return {safe_line(path): value}
