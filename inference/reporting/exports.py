"""The numbers of an evaluation as CSV, Parquet and LaTeX, for spreadsheets, data frames and papers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from data.files import atomic_write, safe_line, write_text
from inference.reporting.rows import Row
from inference.reporting.tables import Summaries, drafter_rows, footnotes
from inference.results.folders import EvaluationResults

Format = Literal["csv", "parquet", "latex"]
SUFFIXES: dict[Format, str] = {"csv": ".csv", "parquet": ".parquet", "latex": ".tex"}
NESTED = ("draft_tokens", "lengths", "length_seconds", "reasoning", "served")  # fields of a summary, None if unknown
LATEX_ESCAPES = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}"}
    | {">": r"\textgreater{}", "×": r"$\times$", "–": "--", "†": r"\dag{}", "→": r"$\rightarrow$"}
)


def export(folder: Path, name: str, formats: Sequence[Format], rows: Sequence[Mapping[str, Any]], latex: str) -> None:
    """Write the same numbers in several formats.

    Args:
        folder: The folder to write to.
        name: Name of the files, without their suffix.
        formats: The formats; each is written once.
        rows: Flat rows for CSV and Parquet.
        latex: The text of the LaTeX file.
    """
    for kind in dict.fromkeys(formats):
        path = folder / f"{name}{SUFFIXES[kind]}"
        if kind == "latex":
            write_text(path, latex)
        else:
            _write_rows(path, kind, rows)


def summary_records(evaluations: Sequence[EvaluationResults]) -> list[dict[str, Any]]:
    """A flat row for each drafter on each benchmark, and for each of its categories where there are several.

    A row has the conditions, the names, and the numbers of the `Summary` or `CategorySummary` as `flat_figures` names
    them. The rows of a whole benchmark have no category.
    """
    rows = []
    for results in evaluations:
        for benchmark, by_drafter in results.summaries.items():
            for drafter, summary in by_drafter.items():
                names = {**results.conditions, "evaluation": results.name, "benchmark": benchmark, "drafter": drafter}
                names["max_new_tokens"] = results.length_cap(benchmark)
                rows.append({**names, "category": None, **flat_figures(asdict(summary))})
                categories = summary.by_category if len(summary.by_category) > 1 else {}
                for category, own in categories.items():
                    identical = {"identical": round(own.identical * own.questions)}
                    rows.append({**names, "category": category, **flat_figures(asdict(own)), **identical})
    columns = dict.fromkeys(key for row in rows for key in row)
    return [{key: row.get(key) for key in columns} for row in rows]


def latex_tables(summaries: Summaries) -> str:
    """A LaTeX table for each benchmark, with the columns of the report."""
    parts = []
    for benchmark, by_drafter in summaries.items():
        headings, rows = drafter_rows(by_drafter)
        parts.append(latex_table(headings, rows, [benchmark, *footnotes(by_drafter)]))
    return "\n".join(parts)


def latex_table(headings: Sequence[str], rows: Sequence[Row], caption: Sequence[str] = ()) -> str:
    """A table for a LaTeX document that loads the package booktabs.

    The best value of a column is bold; intervals and what else is small stand behind their value.
    """
    lines = [r"\begin{table}", r"\centering", rf"\begin{{tabular}}{{l{'r' * (len(headings) - 1)}}}", r"\toprule"]
    lines += [" & ".join(map(_escape, headings)) + r" \\", r"\midrule"]
    for row in rows:
        cells = [
            (rf"\textbf{{{_escape(cell)}}}" if at in row.best else _escape(cell))
            + (rf" {{\scriptsize ({_escape(row.small[at])})}}" if row.small.get(at) else "")
            for at, cell in enumerate(row.cells)
        ]
        lines.append(" & ".join(cells) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\caption{{{_escape('. '.join(caption))}}}"] if caption else []
    return "\n".join([*lines, r"\end{table}", ""])


def _write_rows(path: Path, kind: Format, rows: Sequence[Mapping[str, Any]]) -> None:
    import pyarrow
    from pyarrow import csv, parquet

    table = pyarrow.Table.from_pylist([{key: _plain(value) for key, value in row.items()} for row in rows])
    with atomic_write(path) as new:
        if kind == "csv":
            csv.write_csv(table, str(new))
        else:
            parquet.write_table(table, str(new))


def flat_figures(values: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a summary without nested values.

    An interval becomes two figures, ``..._low`` and ``..._high``. There is one figure for each draft position
    (``acceptance_rate_2``, ``conditional_rate_2``), phase (``propose_seconds``) and range of lengths, named by its
    start: ``acceptance_length_at_1024`` and ``step_seconds_at_1024`` by position in the context, ``..._prompt_1024`` by
    length of the prompt. Categories have rows of their own.

    Args:
        values: A `Summary` or `CategorySummary` as a dictionary.
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if key.endswith("_interval"):
            flat |= _with_ends(key, value)
        elif key == "quality":
            flat |= {f"quality {name}": grade for name, grade in value.items()}
        elif key == "first_divergence":
            parts = (f"first_divergence_{part}" for part in ("question", "turn", "token"))
            flat |= zip(parts, value or (None, None, None), strict=True)
        elif key == "phase_seconds":
            flat |= {f"{phase}_seconds": seconds for phase, seconds in value.items()}
        elif key == "acceptance_by_depth":  # in results of all versions
            flat |= {f"acceptance_rate_{position}": rate for position, rate in enumerate(value, 1)}
        elif key == "draft_tokens" and value:
            flat |= {name: value[name] for name in ("fed_per_token", "wasted_per_token")} | value["conventions"]
            for position, rate in enumerate(value["rates"], 1):
                flat |= _figure(f"acceptance_rate_{position}", rate["rate"], rate["interval"])
                flat |= _figure(f"conditional_rate_{position}", rate["conditional_rate"], rate["conditional_interval"])
        elif key == "lengths" and value:
            flat |= _by_length(value, values.get("length_seconds"))
        elif key == "reasoning" and value:
            flat["turns_with_reasoning"] = value["turns"]
            for part in ("reasoning", "answer"):
                own = value[part]
                flat |= _figure(f"acceptance_length_{part}", own["acceptance_length"], own["acceptance_interval"])
                flat[f"steps_{part}"] = own["steps"]
        elif key == "served" and value:
            flat |= {name: value[name] for name in ("engine", "concurrency", "tokens_per_cpu_second", "cpu_speedup")}
            for name in ("first_token", "inter_token"):
                flat[f"{name}_p50"], flat[f"{name}_p95"] = value[name] or (None, None)
        elif key not in NESTED and (value is None or isinstance(value, (int, float, str))):
            flat[key] = value
    return flat


def _by_length(lengths: Mapping[str, Any], seconds: Mapping[str, Any] | None) -> dict[str, Any]:
    """The figures of each range of lengths, with the median times of its steps and prefills where they are known."""
    flat: dict[str, Any] = {}
    for kind, name in (("by_position", "at"), ("by_prompt", "prompt")):
        for index, own in enumerate(lengths[kind]):
            place = f"{name}_{own['start']}"
            flat |= _figure(f"acceptance_length_{place}", own["acceptance_length"], own["acceptance_interval"])
            flat[f"steps_{place}"] = own["steps"]
            if seconds:
                flat[f"step_seconds_{place}"] = seconds[kind][index]
            if seconds and kind == "by_prompt":
                flat[f"prefill_seconds_{place}"] = seconds["prefill"][index]
    return flat


def _figure(name: str, value: float | None, interval: Sequence[float] | None) -> dict[str, float | None]:
    return {name: value, **_with_ends(name, interval)}


def _with_ends(name: str, interval: Sequence[float] | None) -> dict[str, float | None]:
    low, high = interval or (None, None)
    return {f"{name}_low": low, f"{name}_high": high}


def _plain(value: Any) -> Any:
    return safe_line(value) if isinstance(value, str) else value


def _escape(text: str) -> str:
    return safe_line(text).translate(LATEX_ESCAPES)
