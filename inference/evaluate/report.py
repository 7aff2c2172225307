"""``drafters report``: pages of evaluations, and two evaluations compared."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from data.safe_text import SafeConsole, escape_markdown
from inference.evaluate import compare, tables
from inference.evaluate.page import find_decoder, write_page
from inference.evaluate.results import read, read_all
from inference.options import Format
from inference.runs import new_file


def report_folders(
    folders: Sequence[str], tokenizer: str | None, out: str | None, overwrite: bool, formats: Sequence[Format]
) -> None:
    """Write the page of some evaluations, and print their tables."""
    if out is None and len(folders) != 1:
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
    tables.write_tables(page, formats, text, [table.latex() for table in listed], tables.figure_rows(evaluations))
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
        tables.write_tables(page, formats, "\n".join(parts), [table.latex() for table in listed], rows)
    if missing or any(difference.verdict == "regression" for difference in differences):
        sys.exit(1)


def _new_page(out: str | None, formats: Sequence[Format], overwrite: bool) -> Path | None:
    """The page; raises ValueError if it, or a file beside it, is already there or cannot be made."""
    if out is None:
        return None
    page = new_file(out, overwrite)
    for path in (tables.table_path(page, kind) for kind in formats):
        if path == page:
            raise ValueError(f"--out {out} names the page and a table: end it in .html")
        new_file(str(path), overwrite)
    return page
