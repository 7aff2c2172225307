"""Folders that `drafters eval --out` wrote: read back, and put together where they may be compared."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from inference.registry import catalogue
from inference.results import records
from inference.results.metrics import CategorySummary, Summary
from inference.results.records import Answer

CONDITIONS = ("base", "dtype", "device", "decoding", "template")  # of a context; runs that differ in one do not mix

NEEDED = ("drafter", "baseline", "questions", "identical", "tokens", "seconds", "acceptance_by_depth", "phase_seconds")


@dataclass(frozen=True)
class Run:
    """One evaluation, or several under the same conditions.

    Args:
        name: The folder's name.
        contexts: What was run, by folder.
        summaries: By benchmark, by drafter.
        answers: By benchmark, by drafter; empty where they were not kept.
    """

    name: str
    contexts: dict[str, dict[str, Any]]
    summaries: dict[str, dict[str, Summary]]
    answers: dict[str, dict[str, list[Answer]]]

    @property
    def conditions(self) -> dict[str, Any]:
        """What all its drafters share."""
        context = next(iter(self.contexts.values()))
        return {key: context[key] for key in CONDITIONS if key in context}

    @property
    def context(self) -> dict[str, Any]:
        """What was run, in one list: where folders differ, with the folder's name."""
        return {
            key if len(values) == 1 else f"{name}, {key}": told
            for key, values in by_key(self.contexts).items()
            for name, told in zip(self.contexts, values, strict=False)
            if told is not None
        }


def by_key(contexts: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Any]]:
    """What was run, by key: one value where all folders agree, or else one for each, None where nothing is told."""
    keys = dict.fromkeys(key for context in contexts.values() for key in context)
    told = {key: [context.get(key) for context in contexts.values()] for key in keys}
    return {key: values[:1] if all(v == values[0] for v in values) else values for key, values in told.items()}


def read(folder: str | Path, name: str | None = None) -> Run:
    """Read one folder.

    Raises:
        ValueError: `drafters eval` did not write it.
    """
    path = Path(folder) / "results.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no results.json: give a folder that `drafters eval --out` wrote")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        context = dict(found["context"])
        summaries = {
            benchmark: {drafter: summary_from_json(told) for drafter, told in by_drafter.items()}
            for benchmark, by_drafter in found["results"].items()
        }
        if not all(summaries.values()) or not summaries:
            raise ValueError("no results")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not what `drafters eval --out` writes ({type(error).__name__}: {error}): give its folder"
        ) from error
    answers: dict[str, dict[str, list[Answer]]] = {}
    for benchmark, by_drafter in summaries.items():
        files = sorted((Path(folder) / "answers" / benchmark).glob("*.jsonl"))
        given = {own[0].drafter: own for own in map(records.read, files) if own}
        answers[benchmark] = {drafter: given[drafter] for drafter in by_drafter if drafter in given}
    name = name or Path(folder).resolve().name
    return Run(name, {name: context}, summaries, answers)


def read_all(folders: Sequence[str]) -> list[Run]:
    """Read folders, and put those together that were run under the same conditions, on the same questions.

    Raises:
        ValueError: A folder is named twice, or `drafters eval` did not write it.
    """
    paths = [Path(folder).resolve() for folder in folders]
    if twice := [folder for folder, path in zip(folders, paths, strict=True) if paths.count(path) > 1]:
        raise ValueError(f"{twice[0]} is named twice: name each folder once")
    names = [path.name for path in paths]
    alike: list[list[Run]] = []
    for folder, name in zip(folders, names, strict=True):
        run = read(folder, name if names.count(name) == 1 else str(folder))
        own = next((runs for runs in alike if all(is_comparable(run, other) for other in runs)), None)
        if own is None:
            alike.append([run])
        else:
            own.append(run)
    return [runs[0] if len(runs) == 1 else together(runs) for runs in alike]


def is_comparable(run: Run, other: Run) -> bool:
    """Whether conditions are the same and, where both ran a benchmark, the baseline's known answers too."""
    shared = run.summaries.keys() & other.summaries.keys()
    pairs = [(_baseline_tokens(run, benchmark), _baseline_tokens(other, benchmark)) for benchmark in shared]
    return run.conditions == other.conditions and all(own and own == its for own, its in pairs)


def together(runs: Sequence[Run]) -> Run:
    """One run of all drafters. Each keeps the ratios to the baseline of its own folder.

    Drafters that would be called alike are told apart by their folders, of weights or else of results.
    """
    names = _names(runs)
    summaries: dict[str, dict[str, Summary]] = {}
    answers: dict[str, dict[str, list[Answer]]] = {}
    for run in runs:
        for benchmark, by_drafter in run.summaries.items():
            taken = summaries.setdefault(benchmark, {})
            new = {drafter: names[run.name, drafter] for drafter in by_drafter}
            new = {drafter: f"{name} ({run.name})" if name in taken else name for drafter, name in new.items()}
            for drafter, summary in by_drafter.items():
                baseline = new.get(summary.baseline, summary.baseline)
                taken[new[drafter]] = replace(summary, drafter=new[drafter], baseline=baseline)
            for drafter, own in run.answers[benchmark].items():
                renamed = [replace(answer, drafter=new[drafter]) for answer in own]
                answers.setdefault(benchmark, {})[new[drafter]] = renamed
    contexts = {name: context for run in runs for name, context in run.contexts.items()}
    return Run(", ".join(run.name for run in runs), contexts, summaries, answers)


def summary_from_json(told: Mapping[str, Any]) -> Summary:
    """The inverse of `dataclasses.asdict`; what an older version did not tell is None."""
    by_category = {kind: _fill(CategorySummary, own) for kind, own in told["by_category"].items()}
    needed = (
        "drafter",
        "baseline",
        "questions",
        "identical",
        "tokens",
        "seconds",
        "acceptance_by_depth",
        "phase_seconds",
    )
    summary = _fill(Summary, told | {key: told[key] for key in needed})
    return replace(summary, by_category=by_category)


def _fill(kind, told: Mapping[str, Any]):
    known = [field for field in fields(kind) if field.name in told or field.default_factory is MISSING]
    values = {field.name: told.get(field.name) for field in known}
    for name, value in values.items():
        if isinstance(value, list) and name != "acceptance_by_depth":
            values[name] = tuple(value)
    return kind(**values)


def _baseline_tokens(run: Run, benchmark: str) -> dict[int, list[list[int]]] | None:
    """The baseline's tokens by question, if they were kept."""
    baseline = next(iter(run.summaries[benchmark].values())).baseline
    own = run.answers[benchmark].get(baseline)
    return own and {answer.question_id: [turn.token_ids for turn in answer.turns] for answer in own}


def _names(runs: Sequence[Run]) -> dict[tuple[str, str], str]:
    """A name for each drafter of each run: with the folder of its weights where a kind has several."""
    specs: dict[tuple[str, str], str] = {}
    for run in runs:
        (context,) = run.contexts.values()
        named = {
            catalogue.label(spec): spec for spec in re.findall(r"--drafter[= ](\S+)", str(context.get("command", "")))
        }
        for by_drafter in run.summaries.values():
            specs |= {(run.name, drafter): named.get(drafter, drafter) for drafter in by_drafter}
    folders: dict[str, set[str | None]] = {}
    for spec in specs.values():
        kind, folder = _kind_and_folder(spec)
        folders.setdefault(kind, set()).add(folder)
    return {
        (run, drafter): spec if len(folders[_kind_and_folder(spec)[0]]) > 1 else drafter
        for (run, drafter), spec in specs.items()
    }


def _kind_and_folder(spec: str) -> tuple[str, str | None]:
    try:
        kind, folder, _ = catalogue.split(spec)
    except ValueError:  # such as "ctc (lossy)"
        return spec, None
    return kind, folder
