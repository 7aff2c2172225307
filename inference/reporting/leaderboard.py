"""``drafters leaderboard``: one static page with the drafters of many evaluations, which says what may be compared."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.files import MALFORMED, read_json, safe_text, write_text
from inference.outputs import new_file
from inference.reporting.rows import number
from inference.results.conditions import CONDITIONS, LENGTH_CAP, UNKNOWN, automatic_drafters, base_labels
from inference.results.folders import EvaluationResults, read
from inference.results.metrics import Summary

TEMPLATE = Path(__file__).with_name("leaderboard.html.j2")
FILTERS = ("base", "dtype", "benchmark", "temperature")
MAX_TIMING_ERROR = 0.1  # of a speed-up that is shown without a remark
REQUESTS = "requests at once"  # a condition in servers
NO_FINGERPRINT = "prompts unknown"


@dataclass(frozen=True)
class Entry:
    """A drafter on a benchmark in one evaluation.

    Args:
        conditions: What must be equal in rows that are compared, by name.
        evaluation: Name of the results folder.
        date: Day of the evaluation.
        summary: The numbers.
        remarks: What speaks against the numbers.
    """

    conditions: dict[str, str]
    evaluation: str
    date: str
    summary: Summary
    remarks: tuple[str, ...]

    @property
    def speedup(self) -> tuple[float | None, tuple[float, float] | None]:
        """The speed-up and its interval; those of wall time in results of older versions."""
        own = self.summary
        if own.speedup is None:
            return own.wall_speedup, own.wall_speedup_interval
        return own.speedup, own.speedup_interval

    @property
    def temperature(self) -> str:
        """The sampling temperature; 0 is greedy decoding."""
        found = re.match(r"temperature ([\d.]+)", self.conditions["decoding"])
        return found[1] if found else "0"


def leaderboard(folders: list[str], out: str, overwrite: bool = False) -> None:
    """Make one self-contained HTML page from many evaluations: a table to sort and filter, and a plot.

    Rows may be compared if they have the same base, dtype, device, template, decoding, length cap, prompts and, in a
    server, number of requests at once; the page shows one such set at a time and numbers the sets. The base is known by
    the fingerprint of its files, or else by its name. Rows of drafters that are lossy, whose texts differ from the
    base's, or whose times are imprecise are marked. Results without a fingerprint of their prompts, as older versions
    wrote them, are comparable within their own folder only.

    Args:
        folders: Folders that `drafters eval --out` wrote, or folders that hold such folders.
        out: The page, an HTML file.
        overwrite: Replace the page if it is already there.
    """
    path = new_file(out, overwrite)
    paths = result_folders(folders)
    shared = Counter(path.resolve().name for path in paths)
    names = [path.resolve().name if shared[path.resolve().name] == 1 else str(path) for path in paths]
    results = [read(path, name, with_answers=False) for path, name in zip(paths, names, strict=True)]
    entries = all_entries(results)
    if not entries:
        raise ValueError("the folders hold no drafter besides the base alone: evaluate some with drafters eval")
    sets = comparable_sets(entries)
    write_text(path, page(sets))
    print(f"Leaderboard: {path} ({len(entries)} rows, {len(sets)} sets of comparable ones)")


def result_folders(folders: Sequence[str]) -> list[Path]:
    """The folders that hold results, among the given ones and below them, each once.

    Raises:
        ValueError: A folder holds no results.
    """
    found: dict[Path, Path] = {}
    for folder in folders:
        paths = sorted(Path(folder).rglob("results.json"))
        if not paths:
            raise ValueError(f"{folder} holds no results.json: give a folder that `drafters eval --out` wrote")
        evaluations = [path for path in paths if path.parent == Path(folder) or _is_evaluation(path)]
        found |= {path.parent.resolve(): path.parent for path in evaluations}
    return list(found.values())


def _is_evaluation(path: Path) -> bool:
    """Whether a file below a named folder is of `drafters eval`; sweeps and replays write one of the same name."""
    try:
        return "base" in read_json(path)["context"]
    except MALFORMED:
        return True  # reading it says what is wrong


def all_entries(evaluations: Sequence[EvaluationResults]) -> list[Entry]:
    """The entries of all evaluations, in which equal names of a base mean the same base."""
    labels = base_labels([context for results in evaluations for context in results.contexts.values()])
    return [entry for results, base in zip(evaluations, labels, strict=True) for entry in entries_of(results, base)]


def entries_of(results: EvaluationResults, base: str) -> list[Entry]:
    """An entry for each drafter but the base alone, on each benchmark of an evaluation.

    Args:
        results: The evaluation of one folder.
        base: Name of its base.
    """
    (context,) = results.contexts.values()
    entries = []
    for benchmark, by_drafter in results.summaries.items():
        about = results.benchmarks.get(benchmark, {})
        conditions = {"base": base}
        conditions |= {key: str(results.conditions.get(key, UNKNOWN)) for key in CONDITIONS if key != "base"}
        conditions |= {"benchmark": benchmark, LENGTH_CAP: str(results.length_cap(benchmark) or UNKNOWN)}
        conditions["prompts"] = str(about.get("prompts", f"{UNKNOWN}, of {results.name}"))
        for summary in by_drafter.values():
            if not summary.is_baseline:
                remarks = tuple(_remarks(summary, context, conditions))
                own = conditions | ({REQUESTS: str(summary.served.concurrency)} if summary.served else {})
                entries.append(Entry(own, results.name, str(context.get("date", "")), summary, remarks))
    return entries


def comparable_sets(entries: Sequence[Entry]) -> list[list[Entry]]:
    """The entries with equal conditions, the largest set first; in a set, the highest speed-up first."""
    sets: dict[tuple[tuple[str, str], ...], list[Entry]] = {}
    for entry in entries:
        sets.setdefault(tuple(entry.conditions.items()), []).append(entry)
    ordered = sorted(sets.values(), key=len, reverse=True)
    return [sorted(own, key=lambda entry: -(entry.speedup[0] or 0)) for own in ordered]


def set_names(sets: Sequence[Entry]) -> list[str]:
    """A name for each set, given by one of its entries, that also states in what sets differ that would look alike."""
    short = [
        ", ".join(
            [entry.conditions[key] for key in ("benchmark", "base", "dtype")]
            + [f"temperature {entry.temperature}", f"at most {entry.conditions[LENGTH_CAP]} tokens"]
            + [f"{count} {REQUESTS}" for key, count in entry.conditions.items() if key == REQUESTS]
        )
        for entry in sets
    ]
    alike = {name: [entry for entry, own in zip(sets, short, strict=True) if own == name] for name in short}
    names = []
    for name, entry in zip(short, sets, strict=True):
        others = [other.conditions for other in alike[name]]
        own = [f"{key}: {value}" for key, value in entry.conditions.items() if any(o.get(key) != value for o in others)]
        names.append(", ".join([name, *own]))
    return names


def page(sets: Sequence[Sequence[Entry]]) -> str:
    """The page as HTML; every text in it is escaped."""
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_safe)
    environment.filters.update(number=number)
    rows = [_row(number, entry) for number, own in enumerate(sets, 1) for entry in own]
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        rows=rows,
        sets=[own[0].conditions for own in sets],
        set_names=set_names([own[0] for own in sets]),
        choices={name: sorted({row[name] for row in rows}) for name in FILTERS},
    )


def _remarks(summary: Summary, context: dict[str, Any], conditions: dict[str, str]) -> list[str]:
    remarks = []
    if "lossy" in summary.drafter or "lossy" in conditions["decoding"]:
        remarks.append("lossy")
    elif summary.identical < summary.questions:
        remarks.append("texts differ from the base's")
    if summary.speedup is None:
        remarks.append("speed-up by wall time")
    elif summary.timing_error is None or summary.timing_error > MAX_TIMING_ERROR:
        known = summary.timing_error is not None
        remarks.append(f"timing ± {100 * (summary.timing_error or 0):.0f} %" if known else "timing error unknown")
    if summary.drafter in automatic_drafters(context):
        remarks.append("automatic budget: acceptance depends on times")
    if conditions["prompts"].startswith(UNKNOWN):
        remarks.append(NO_FINGERPRINT)
    return remarks


def _row(number: int, entry: Entry) -> dict[str, Any]:
    summary, (speedup, interval) = entry.summary, entry.speedup
    row = {
        **{name: entry.conditions[name] for name in ("base", "dtype", "benchmark")},
        "temperature": entry.temperature,
        "set": number,
        "drafter": summary.drafter,
        "speedup": speedup,
        "speedup_interval": interval,
        "acceptance": summary.acceptance_length,
        "acceptance_interval": summary.acceptance_interval,
        "fed": summary.fed_per_step,
        "lossless": summary.identical / summary.questions,
        "identical": f"{summary.identical}/{summary.questions}",
        "remarks": "; ".join(entry.remarks),
        "is_marked": entry.remarks not in ((), (NO_FINGERPRINT,)),
        "evaluation": entry.evaluation,
        "date": entry.date,
    }
    return {key: _safe(value) for key, value in row.items()}


def _safe(value: Any) -> Any:
    return safe_text(value) if type(value) is str else value  # a string that is marked as HTML is ours
