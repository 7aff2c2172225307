"""The results of evaluations: what a folder holds, and how folders under the same conditions become one."""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from data.files import delete_stale, read_json, reading, validated, write_text
from inference.drafter_specs import split
from inference.evaluate import answers as answer_files
from inference.evaluate.answers import Answer
from inference.evaluate.intervals import Count
from inference.evaluate.metrics import Summary
from inference.evaluate.plan import LOSSY, DrafterConditions, RunConditions, differing
from inference.timing import MachineLoad

Summaries = Mapping[str, Mapping[str, Summary]]  # by benchmark and drafter


@dataclass(frozen=True)
class RunRecord:
    """What happened in an evaluation."""

    load: MachineLoad | None = None  # None in a server elsewhere
    repeats: dict[str, Count] = field(default_factory=dict)  # how often every question was decoded, by benchmark
    starts: Count = 1  # of the command, until all answers were there
    ran_code: bool = False  # whether the programs in the answers were run, in bubblewrap
    left_out: list[str] = field(default_factory=list)  # one line each
    warnings: list[str] = field(default_factory=list)  # what speaks against the figures, one line each
    row_multiple: Count | None = None  # of bit-identical rows, which are fed in multiples of it
    date: str = field(default_factory=lambda: datetime.now(timezone.utc).strftime("%Y-%m-%d"))
    command: str = field(default_factory=lambda: " ".join(["drafters", *sys.argv[1:]]))


@dataclass(frozen=True)
class Run:
    """The content of results.json without the figures."""

    conditions: RunConditions
    run: RunRecord

    def describe(self) -> dict[str, str]:
        """What was run, in words, by what it is."""
        own, run = self.conditions, self.run
        prints = {name: f" ({each.fingerprint})" * bool(each.fingerprint) for name, each in own.drafters.items()}
        load = {} if run.load is None else {name: value for name, value in asdict(run.load).items() if value}
        told = {
            "base": own.base + f" ({own.base_fingerprint})" * bool(own.base_fingerprint),
            **own.same(),
            "bit-identical": f"yes (rows in multiples of {run.row_multiple})" if run.row_multiple else "",
            "drafters": "; ".join(f"{name}: {each.spec}{prints[name]}" for name, each in own.drafters.items()),
            "length caps": ", ".join(f"{cap} tokens ({name})" for name, cap in own.caps.items()),
            "questions decoded": ", ".join(f"{count} times ({name})" for name, count in run.repeats.items()),
            "machine": ", ".join(f"{name} {value}" for name, value in load.items()),
            "versions": ", ".join(f"{name} {version}" for name, version in own.versions.items()),
            "programs in the answers": "were run in bubblewrap" * run.ran_code,
            "starts": str(run.starts) if run.starts > 1 else "",
            "date": run.date,
            "command": run.command,
        }
        return {key: value for key, value in told.items() if value}


@dataclass(frozen=True)
class EvaluationResults:
    """The results of one evaluation, or of several under the same conditions."""

    name: str  # of the folder, or of the folders
    runs: dict[str, Run]  # by folder
    summaries: dict[str, dict[str, Summary]]  # by benchmark and `Summary.name`
    answers: dict[str, dict[str, list[Answer]]]  # in the same way; without those whose files are gone

    @property
    def conditions(self) -> RunConditions:
        """The conditions; of several evaluations, those of the first one."""
        return next(iter(self.runs.values())).conditions

    def drafter(self, name: str) -> DrafterConditions | None:
        """What the drafter of this name is, in the first of the runs that has it."""
        return next((own for run in self.runs.values() if (own := run.conditions.drafters.get(name))), None)

    def cap(self, benchmark: str) -> int | None:
        """Maximum number of tokens of an answer."""
        return next((cap for run in self.runs.values() if (cap := run.conditions.caps.get(benchmark))), None)

    def lines(self, kind: str) -> list[str]:
        """The lines of ``warnings`` or ``left_out``, which begin with their folder if there are several."""
        prefix = {name: f"{name}: " if len(self.runs) > 1 else "" for name in self.runs}
        return [prefix[name] + line for name, run in self.runs.items() for line in getattr(run.run, kind)]


def write(folder: Path, results: EvaluationResults) -> None:
    """Write results.json and the answers of one evaluation."""
    written: set[Path] = set()
    for benchmark, by_drafter in results.answers.items():
        for drafter, own in by_drafter.items():
            name = "".join(c if c.isalnum() or c in "._-=" else "_" for c in drafter)
            path = folder / "answers" / benchmark / f"{name}.jsonl"
            while path in written:  # another drafter, whose name differs in such characters alone
                path = path.with_name(f"{path.stem}_.jsonl")
            answer_files.write(path, own)
            written.add(path)
    delete_stale(folder / "answers", {str(path.relative_to(folder / "answers")) for path in written})
    (run,) = results.runs.values()
    figures = {name: [asdict(summary) for summary in by.values()] for name, by in results.summaries.items()}
    content = json.dumps({**asdict(run), "results": figures}, indent=2, ensure_ascii=False)
    write_text(folder / "results.json", content + "\n")


def read(folder: str | Path, name: str | None = None) -> EvaluationResults:
    """Read one folder, under its own name or another; raises ValueError if `drafters eval` did not write it."""
    path = Path(folder) / "results.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no results.json: give a folder that `drafters eval --out` wrote")
    with reading(path, "run this version's `drafters eval` again"):
        content = read_json(path)
        run = validated(Run, {key: content[key] for key in ("conditions", "run")})
        listed = validated(dict[str, list[Summary]], content["results"])
        if not listed or not all(listed.values()):
            raise ValueError("no results")
    summaries = {benchmark: {summary.name: summary for summary in own} for benchmark, own in listed.items()}
    answers: dict[str, dict[str, list[Answer]]] = {}
    for benchmark, by_drafter in summaries.items():
        files = sorted((Path(folder) / "answers" / benchmark).glob("*.jsonl"))
        recorded = {own[0].drafter: own for own in map(answer_files.read, files) if own}
        answers[benchmark] = {drafter: recorded[drafter] for drafter in by_drafter if drafter in recorded}
    name = name or Path(folder).resolve().name
    return EvaluationResults(name, {name: run}, summaries, answers)


# ---- several evaluations


def read_all(folders: Sequence[str]) -> list[EvaluationResults]:
    """Read folders, and merge those that may be compared; raises ValueError if a folder is named twice."""
    paths = [Path(folder).resolve() for folder in folders]
    if twice := [folder for folder, path in zip(folders, paths, strict=True) if paths.count(path) > 1]:
        raise ValueError(f"{twice[0]} is named twice: name each folder once")
    names = Counter(path.name for path in paths)
    groups: list[list[EvaluationResults]] = []
    for folder, path in zip(folders, paths, strict=True):
        results = read(folder, path.name if names[path.name] == 1 else str(folder))
        group = next((group for group in groups if all(is_comparable(results, other) for other in group)), None)
        if group is None:
            groups.append(group := [])
        group.append(results)
    return [group[0] if len(group) == 1 else merge(group) for group in groups]


def is_comparable(results: EvaluationResults, other: EvaluationResults) -> bool:
    """Whether the conditions are equal and, in what both contain, benchmarks, drafters and the baseline's answers."""
    ours, its = results.conditions, other.conditions
    shared = results.summaries.keys() & other.summaries.keys()
    if differing(ours, its):
        return False
    if any(ours.benchmarks[name] != its.benchmarks[name] for name in shared):
        return False
    tokens = [[_baseline_tokens(each, benchmark) for each in (results, other)] for benchmark in shared]
    return all(own and own == other for own, other in tokens)


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
            taken = {summary.drafter for summary in merged.values()}
            own = {name: names[results.name, name] for name in {summary.drafter for summary in by_drafter.values()}}
            own = {name: new + f" ({results.name})" * (new in taken) for name, new in own.items()}
            for name, summary in by_drafter.items():
                new = replace(summary, drafter=own[summary.drafter], baseline=own[summary.baseline])
                merged[new.name] = new
                if name in results.answers[benchmark]:
                    renamed = [replace(answer, drafter=new.name) for answer in results.answers[benchmark][name]]
                    answers.setdefault(benchmark, {})[new.name] = renamed
    runs = {name: run for results in group for name, run in results.runs.items()}
    return EvaluationResults(", ".join(results.name for results in group), runs, summaries, answers)


def _baseline_tokens(results: EvaluationResults, benchmark: str) -> dict[int, list[list[int]]]:
    """The baseline's tokens of each turn, by question; none if its answers are gone."""
    baseline = next((name for name, of in results.summaries[benchmark].items() if of.is_baseline), "")
    answers = results.answers[benchmark].get(baseline, [])
    return {answer.question_id: [turn.token_ids for turn in answer.turns] for answer in answers}


def _distinct_names(group: Sequence[EvaluationResults]) -> dict[tuple[str, str], str]:
    """A name for each drafter of each evaluation: with the folder of its weights if those of a kind have several."""
    drafters = {(each.name, name): own for each in group for name, own in each.conditions.drafters.items()}
    parts = {key: (own.spec, None) if "://" in own.spec else split(own.spec)[:2] for key, own in drafters.items()}
    num_folders = Counter(kind for kind, _ in set(parts.values()))
    return {
        key: f"{own.spec}{LOSSY * own.is_lossy}" if num_folders[parts[key][0]] > 1 else key[1]
        for key, own in drafters.items()
    }
