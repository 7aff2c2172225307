"""Reads the folders that `drafters eval --out` wrote, and merges those that may be compared."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from data.files import MALFORMED, read_json, validated
from inference import drafter_specs
from inference.results import records
from inference.results.conditions import CONDITIONS, cap_in, differing, differing_budgets, with_separate_cap
from inference.results.length_figures import length_figures
from inference.results.metrics import CategorySummary, Summary
from inference.results.records import Answer
from inference.results.served_figures import served_name

# Keys of a summary that every version has written.
REQUIRED = (
    "drafter",
    "baseline",
    "questions",
    "identical",
    "tokens",
    "seconds",
    "acceptance_by_depth",
    "phase_seconds",
)


@dataclass(frozen=True)
class EvaluationResults:
    """The results of one evaluation, or of several under the same conditions.

    Args:
        name: Name of the folder, or of the folders.
        contexts: What was run, by folder.
        summaries: The summaries, by benchmark and drafter.
        answers: The answers, by benchmark and drafter; without those whose files are gone.
        benchmarks: ``prompts`` (a fingerprint of the questions) and ``max_new_tokens``, by benchmark; of several
            folders, the first one's; empty if older versions wrote the results.
    """

    name: str
    contexts: dict[str, dict[str, Any]]
    summaries: dict[str, dict[str, Summary]]
    answers: dict[str, dict[str, list[Answer]]]
    benchmarks: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def conditions(self) -> dict[str, Any]:
        """The conditions under which all drafters were measured."""
        context = next(iter(self.contexts.values()))
        return {key: context[key] for key in CONDITIONS if key in context}

    def length_cap(self, benchmark: str) -> int | None:
        """Maximum number of tokens of an answer; None if the results do not say it."""
        stated = self.benchmarks.get(benchmark, {}).get("max_new_tokens")
        caps = (cap_in(context, benchmark) for context in self.contexts.values())
        return next((cap for cap in caps if cap is not None), None) if stated is None else int(stated)

    @property
    def context(self) -> dict[str, Any]:
        """What was run, by key; the keys in which folders differ begin with the folder's name."""
        return {
            key if len(values) == 1 else f"{name}, {key}": value
            for key, values in by_key(self.contexts).items()
            for name, value in zip(self.contexts, values, strict=False)
            if value is not None
        }


def by_key(contexts: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Any]]:
    """What was run, by key: one value if all folders agree, otherwise one for each folder, None where it is missing."""
    keys = dict.fromkeys(key for context in contexts.values() for key in context)
    by_folder = {key: [context.get(key) for context in contexts.values()] for key in keys}
    return {key: values[:1] if all(v == values[0] for v in values) else values for key, values in by_folder.items()}


def read(folder: str | Path, name: str | None = None, with_answers: bool = True) -> EvaluationResults:
    """Read one folder.

    Args:
        folder: The folder.
        name: Name of the results; by default that of the folder.
        with_answers: Whether to read the answers, which takes most of the time.

    Raises:
        ValueError: `drafters eval` did not write the folder.
    """
    path = Path(folder) / "results.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no results.json: give a folder that `drafters eval --out` wrote")
    try:
        content = read_json(path)
        context = with_separate_cap(validated(dict[str, Any], content["context"]))
        benchmarks = validated(dict[str, dict[str, Any]], content.get("benchmarks", {}))
        summaries = {
            benchmark: {drafter: summary_from_json(summary) for drafter, summary in by_drafter.items()}
            for benchmark, by_drafter in content["results"].items()
        }
        if not all(summaries.values()) or not summaries:
            raise ValueError("no results")
        for by_drafter in summaries.values():
            if list(by_drafter) != (names := [summary.drafter for summary in by_drafter.values()]):
                raise ValueError(f"the results of {', '.join(by_drafter)} name the drafters {', '.join(names)}")
    except MALFORMED as error:
        raise ValueError(
            f"{path} was not written by `drafters eval --out` ({type(error).__name__}: {error}): give one that was"
        ) from error
    answers: dict[str, dict[str, list[Answer]]] = {}
    for benchmark, by_drafter in summaries.items():
        files = sorted((Path(folder) / "answers" / benchmark).glob("*.jsonl")) if with_answers else []
        recorded = {own[0].drafter: own for own in map(records.read, files) if own}
        answers[benchmark] = {drafter: recorded[drafter] for drafter in by_drafter if drafter in recorded}
        for drafter, own in answers[benchmark].items():
            if by_drafter[drafter].lengths is None:  # an older version wrote the results
                lengths, seconds = length_figures(own)
                by_drafter[drafter] = replace(by_drafter[drafter], lengths=lengths, length_seconds=seconds)
    name = name or Path(folder).resolve().name
    return EvaluationResults(name, {name: context}, summaries, answers, benchmarks)


def read_all(folders: Sequence[str]) -> list[EvaluationResults]:
    """Read folders, and merge those with the same conditions and the same questions.

    Raises:
        ValueError: A folder is named twice, or `drafters eval` did not write it.
    """
    paths = [Path(folder).resolve() for folder in folders]
    if twice := [folder for folder, path in zip(folders, paths, strict=True) if paths.count(path) > 1]:
        raise ValueError(f"{twice[0]} is named twice: name each folder once")
    names = [path.name for path in paths]
    groups: list[list[EvaluationResults]] = []
    for folder, name in zip(folders, names, strict=True):
        results = read(folder, name if names.count(name) == 1 else str(folder))
        group = next((group for group in groups if all(is_comparable(results, other) for other in group)), None)
        if group is None:
            groups.append([results])
        else:
            group.append(results)
    return [group[0] if len(group) == 1 else merge(group) for group in groups]


def is_comparable(results: EvaluationResults, other: EvaluationResults) -> bool:
    """Whether the conditions are equal and, in what both contain, length caps, budgets and the baseline's answers."""
    (context,), (its_context,) = results.contexts.values(), other.contexts.values()
    shared = results.summaries.keys() & other.summaries.keys()
    caps = [{each.length_cap(benchmark) for each in (results, other)} - {None} for benchmark in shared]
    ours, its = ({name for by in each.summaries.values() for name in by} for each in (results, other))
    drafters = [(name, name) for name in ours & its]
    if differing(context, its_context) or differing_budgets(context, its_context, drafters):
        return False
    pairs = [(_baseline_tokens(results, benchmark), _baseline_tokens(other, benchmark)) for benchmark in shared]
    return all(len(cap) < 2 for cap in caps) and all(own and own == its for own, its in pairs)


def merge(group: Sequence[EvaluationResults]) -> EvaluationResults:
    """Merge evaluations into one with the drafters of all; their speed-ups stay relative to their own baselines.

    Drafters of the same name are distinguished by the folder of their weights, or else by the folder of the results.
    """
    names = _distinct_names(group)
    summaries: dict[str, dict[str, Summary]] = {}
    answers: dict[str, dict[str, list[Answer]]] = {}
    for results in group:
        for benchmark, by_drafter in results.summaries.items():
            merged = summaries.setdefault(benchmark, {})
            own_names = {drafter: names[results.name, _without_level(of)] for drafter, of in by_drafter.items()}
            new = {drafter: _with_level(own_names[drafter], of) for drafter, of in by_drafter.items()}
            taken = {own_names[drafter] for drafter, name in new.items() if name in merged}
            ends = {drafter: f" ({results.name})" if name in taken else "" for drafter, name in own_names.items()}
            new = {drafter: name + ends[drafter] for drafter, name in new.items()}
            for drafter, summary in by_drafter.items():
                baseline = new.get(summary.baseline, summary.baseline)
                served = summary.served and replace(summary.served, drafter=own_names[drafter] + ends[drafter])
                merged[new[drafter]] = replace(summary, drafter=new[drafter], baseline=baseline, served=served)
            for drafter, own in results.answers[benchmark].items():
                renamed = [replace(answer, drafter=new[drafter]) for answer in own]
                answers.setdefault(benchmark, {})[new[drafter]] = renamed
    contexts = {name: context for results in group for name, context in results.contexts.items()}
    benchmarks = {name: about for results in group[::-1] for name, about in results.benchmarks.items()}
    return EvaluationResults(", ".join(results.name for results in group), contexts, summaries, answers, benchmarks)


def summary_from_json(values: Mapping[str, Any]) -> Summary:
    """The inverse of `dataclasses.asdict`; what an older version did not write is None.

    Raises:
        KeyError: A key that every version writes is missing.
        ValueError: A value is not of its type.
    """
    if missing := [key for key in REQUIRED if key not in values]:
        raise KeyError(missing[0])
    by_category = {name: _with_all_fields(CategorySummary, own) for name, own in values["by_category"].items()}
    return validated(Summary, {**_with_all_fields(Summary, values), "by_category": by_category})


def _with_all_fields(kind: type[Summary | CategorySummary], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a dataclass's fields, with None for those that are missing and have no default.

    Older versions wrote speed-ups of wall times only, under the names that now stand for those of step times.
    """
    if "wall_speedup" not in values:
        old = {f"wall_{key}": values.get(key) for key in ("speedup", "speedup_interval")}
        values = {**values, **old, "speedup": None, "speedup_interval": None}
    required = [field.name for field in fields(kind) if field.default_factory is MISSING]
    return {**dict.fromkeys(required), **values}


def _baseline_tokens(results: EvaluationResults, benchmark: str) -> dict[int, list[list[int]]] | None:
    """The baseline's tokens of each turn, by question; None if its answers are gone."""
    baseline = next(iter(results.summaries[benchmark].values())).baseline
    if not (answers := results.answers[benchmark].get(baseline)):
        return None
    return {answer.question_id: [turn.token_ids for turn in answer.turns] for answer in answers}


def _distinct_names(group: Sequence[EvaluationResults]) -> dict[tuple[str, str], str]:
    """A name for each drafter of each evaluation; with the folder of its weights if a kind has several."""
    specs: dict[tuple[str, str], str] = {}
    for results in group:
        (context,) = results.contexts.values()
        named = {
            drafter_specs.label(spec): spec
            for spec in re.findall(r"--drafter[= ](\S+)", str(context.get("command", "")))
        }
        for by_drafter in results.summaries.values():
            own = map(_without_level, by_drafter.values())
            specs |= {(results.name, drafter): named.get(drafter, drafter) for drafter in own}
    folders: dict[str, set[str | None]] = {}
    for spec in specs.values():
        kind, folder = _kind_and_folder(spec)
        folders.setdefault(kind, set()).add(folder)
    return {
        (name, drafter): spec if len(folders[_kind_and_folder(spec)[0]]) > 1 else drafter
        for (name, drafter), spec in specs.items()
    }


def _without_level(summary: Summary) -> str:
    """The name of a drafter, without the number of requests at once."""
    return summary.served.drafter if summary.served else summary.drafter


def _with_level(name: str, summary: Summary) -> str:
    return served_name(name, summary.served.concurrency) if summary.served else name


def _kind_and_folder(spec: str) -> tuple[str, str | None]:
    try:
        kind, folder, _ = drafter_specs.split(spec)
    except ValueError:  # such as "ctc (lossy)"
        return spec, None
    return kind, folder
