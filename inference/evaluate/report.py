"""``drafters report``: pages of evaluations, two evaluations compared, and published answers counted again."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from rich.text import Text

from data.files import atomic_write, write_text
from data.safe_text import SafeConsole, escape_markdown, safe_line
from inference.evaluate import compare as comparison
from inference.evaluate import recount, tables
from inference.evaluate.page import find_decoder, write_page
from inference.evaluate.results import EvaluationResults, read, read_all
from inference.runs import new_file

Format = Literal["md", "csv", "parquet", "latex"]


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
    """Make one page of one or many evaluations, compare two, or count published answers by every convention.

    Folders of `drafters eval --out` become one self-contained HTML page. Evaluations with the same conditions and
    questions share their tables and plots; a table of all drafters can be sorted and filtered.

    With --compare, two folders are compared question by question: acceptance length and speed-up of each drafter, with
    intervals of their change. The exit code is 1 if there is a regression, or if the second folder lacks a benchmark, a
    drafter or an answer of the first one, so that a script notices what was not compared.

    With --answers and --baseline, the command reads answer files in FastChat's form, such as those of EAGLE, Spec-Bench
    and the original CTC-drafter, and prints their acceptance lengths and speed-ups by every counting convention.

    Args:
        folders: Folders that `drafters eval --out` wrote, one after the other.
        answers: JSONL file of recorded answers; may be repeated.
        baseline: JSONL file of the base's own answers to the same questions.
        tokenizer: Folder of the base's tokenizer, for the steps of the answers; by default that of the base.
        out: The page, an HTML file; by default report.html in the only folder.
        overwrite: Replace a page that is already there.
        compare: Compare the second folder with the first.
        format: Write the tables also as md or latex, or all figures as csv or parquet, beside the page; may be
            repeated.
    """
    if compare and (not folders or len(folders) != 2 or answers or baseline is not None):
        raise ValueError("--compare takes two folders that drafters eval wrote: first the old one, then the new one")
    if format and out is None and (compare or not folders or len(folders) > 1):
        raise ValueError("--format writes files beside the page: give --out PAGE")
    if folders and compare:
        _compare(folders, out, overwrite, format or [])
    elif folders and not answers and baseline is None:
        _report(folders, tokenizer, out, overwrite, format or [])
    elif answers and not folders and baseline is not None:
        _recount(answers, baseline, out, overwrite, format or [])
    else:
        raise ValueError("give folders that drafters eval wrote, or --answers FILE and --baseline FILE")


def _report(
    folders: Sequence[str], tokenizer: str | None, out: str | None, overwrite: bool, formats: Sequence[Format]
) -> None:
    if out is None and len(folders) > 1:
        raise ValueError("the page of several folders needs a name: give --out PAGE")
    page = Path(folders[0]) / "report.html" if out is None else _check(out, formats, overwrite)
    evaluations = read_all(folders)
    console = SafeConsole()
    for results in evaluations:
        if len(evaluations) > 1:
            console.rule(Text(results.name))
        console.print(*tables.terminal(results), sep="\n")
    plots_folder = None if out else page.parent / "plots"
    write_page(page, [(results, find_decoder(results, tokenizer)) for results in evaluations], plots_folder)
    own = [each for results in evaluations for each in tables.all_tables(results)]
    write_tables(page, formats, "\n".join(map(tables.markdown, evaluations)), own, figures(evaluations))
    print(f"Report: {page}")


def _compare(folders: Sequence[str], out: str | None, overwrite: bool, formats: Sequence[Format]) -> None:
    page = None if out is None else _check(out, formats or ["md"], overwrite)
    before, after = map(read, folders)
    differences = comparison.compare(before, after)
    only_before, only_after = comparison.unpaired(before, after)
    own = tables.difference_tables(differences)
    notes = [
        "Differences are paired by question. The intervals are simultaneous: two equal evaluations have anything "
        "marked in at most 5 % of cases. Not judged: fewer than 10 questions, or an unknown timing error."
    ]
    notes += [f"The evaluations differ in {line}." for line in comparison.differing_conditions(before, after)]
    notes += [f"Missing in {folders[1]}: {line}." for line in only_before]
    notes += [f"Only in {folders[1]}: {line}." for line in only_after]
    if only_before:
        notes.append("What is missing was not compared, so the exit code is 1.")
    console = SafeConsole()
    console.print(*(part for table in own for part in table.rich()), sep="\n")
    console.print(*(Text(line, style="yellow" if at else "dim") for at, line in enumerate(notes)), sep="\n")
    if page:
        rows = [asdict(each) | {"change": each.change, "verdict": each.verdict} for each in differences]
        text = f"# {escape_markdown(after.name)} compared with {escape_markdown(before.name)}\n\n"
        text += "\n".join(table.markdown() for table in own)
        text += "\n" + "".join(f"- {escape_markdown(line)}\n" for line in notes)
        write_tables(page, formats or ["md"], text, own, rows)
    if only_before or any(each.verdict == "regression" for each in differences):
        sys.exit(1)


def _recount(paths: Sequence[str], baseline: str, out: str | None, overwrite: bool, formats: Sequence[Format]) -> None:
    page = None if out is None else _check(out, formats or ["md"], overwrite)
    base, console = recount.read(baseline), SafeConsole()
    pairs = {path: recount.pair(recount.read(path), base) for path in paths}
    own = [recount.table(path, each) for path, each in pairs.items()]
    for table in own:
        console.print(*table.rich(), Text(table.note), sep="\n")
    if page:
        text = "\n".join(table.markdown() for table in own)
        rows = [{"answers": path, **recount.figures(each)} for path, each in pairs.items()]
        write_tables(page, formats or ["md"], text, own, rows)


# ---- files


def _check(out: str, formats: Sequence[Format], overwrite: bool) -> Path:
    """The page; raises ValueError if it, or a file beside it, is already there or cannot be made."""
    page = new_file(out, overwrite)
    for kind in formats:
        new_file(str(table_path(page, kind)), overwrite)
    return page


def table_path(page: Path, kind: Format) -> Path:
    """The file of a format beside a page."""
    return page.with_suffix(".tex" if kind == "latex" else f".{kind}")


def write_tables(
    page: Path, formats: Sequence[Format], text: str, own: Sequence[tables.Table], rows: Sequence[dict[str, Any]]
) -> None:
    """Write the tables and figures of a page beside it, with its name and the suffix of each format.

    The tables are given in Markdown as ``text``, and ``own`` for LaTeX; ``rows`` of figures are for CSV and Parquet.
    """
    import pandas

    for kind in dict.fromkeys(formats):
        path = table_path(page, kind)
        if kind == "md":
            write_text(path, text)
        elif kind == "latex":
            write_text(path, "\n".join(table.latex() for table in own))
        else:
            frame = pandas.DataFrame([_flat(row, kind == "csv") for row in rows])
            with atomic_write(path) as new:
                frame.to_csv(new, index=False) if kind == "csv" else frame.to_parquet(new, index=False)


def figures(evaluations: Sequence[EvaluationResults]) -> list[dict[str, Any]]:
    """A flat row for each drafter on each benchmark: the conditions, and its figures under their paths in results.json.

    The items of lists are named by their place: ``acceptance.rates.1.rate.value`` is the rate of the first position.
    """
    rows = []
    for results in evaluations:
        own = {"evaluation": results.name, "base": results.conditions.base, **results.conditions.same()}
        for benchmark, by_drafter in results.summaries.items():
            names = {**own, "benchmark": benchmark, "max_new_tokens": results.cap(benchmark)}
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
