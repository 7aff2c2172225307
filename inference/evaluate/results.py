"""The results of an evaluation: its conditions, figures and answers, written to a folder and read back."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from data.files import read_json, reading, validated, write_text
from inference.evaluate.answers import REPLACED, Answer, complete_repeats, median_answers, read_answers
from inference.evaluate.conditions import RunConditions, RunRecord
from inference.evaluate.figures import Summary

Summaries = dict[str, dict[str, Summary]]  # by benchmark and `Summary.name`
Answers = dict[str, dict[str, list[Answer]]]  # in the same way


@dataclass(frozen=True)
class EvaluationResults:
    """What an evaluation measured, and what happened in it."""

    conditions: RunConditions
    record: RunRecord
    summaries: Summaries
    answers: Answers  # without those whose files are gone
    name: str = ""  # of the folder


def write(folder: Path, results: EvaluationResults) -> None:
    """Write results.json; the answers are in the folder already, see `AnswerFiles`."""
    figures = {name: [asdict(summary) for summary in by.values()] for name, by in results.summaries.items()}
    content = {"conditions": asdict(results.conditions), "run": asdict(results.record), "results": figures}
    write_text(folder / "results.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read(folder: str | Path, name: str | None = None) -> EvaluationResults:
    """Read one folder, under its own name or another; raises ValueError if `drafters eval` did not write it."""
    path = Path(folder) / "results.json"
    if (Path(folder) / REPLACED).exists():
        raise ValueError(f"{folder} is being replaced: first repeat that `drafters eval`, without --overwrite")
    if not path.is_file():
        raise ValueError(f"{folder} holds no results.json: give a folder that `drafters eval --out` wrote")
    with reading(path, "run this version's `drafters eval` again"):
        content = read_json(path)
        conditions = validated(RunConditions, content["conditions"])
        record = validated(RunRecord, content["run"])
        listed = validated(dict[str, list[Summary]], content["results"])
        if not listed or not all(listed.values()):
            raise ValueError("no results")
    summaries = {benchmark: {summary.name: summary for summary in by_name} for benchmark, by_name in listed.items()}
    answers: Answers = {benchmark: {} for benchmark in summaries}
    recorded = {(benchmark, answers[0].drafter): answers for benchmark, _, answers in read_answers(Path(folder))}
    for benchmark, by_drafter in summaries.items():
        for drafter in (name for name in by_drafter if (benchmark, name) in recorded):
            by_key = {(answer.repeat, answer.question_id): answer for answer in recorded[benchmark, drafter]}
            ids = [number for repeat, number in by_key if repeat == 0]
            answers[benchmark][drafter] = median_answers(complete_repeats(by_key, ids))
    return EvaluationResults(conditions, record, summaries, answers, name or Path(folder).resolve().name)


def read_all(folders: Sequence[str]) -> list[EvaluationResults]:
    """Read several folders; raises ValueError if one is named twice."""
    paths = [Path(folder).resolve() for folder in folders]
    if twice := [folder for folder, path in zip(folders, paths, strict=True) if paths.count(path) > 1]:
        raise ValueError(f"{twice[0]} is named twice: name each folder once")
    names = [path.name for path in paths]
    pairs = zip(folders, names, strict=True)
    return [read(folder, name if names.count(name) == 1 else folder) for folder, name in pairs]
