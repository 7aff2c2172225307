"""The folders of evaluations: written, read back, and merged where they may be compared."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from inference.evaluate import compare
from inference.evaluate.answers import read_answers
from inference.evaluate.conditions import BenchmarkConditions, RunRecord, describe
from inference.evaluate.results import read, read_all
from inference.options import SamplingOptions
from inference.timing import MachineLoad
from tests.inference.evaluate.conftest import write_folder


def test_a_folder_is_read_back_as_it_was_written(tmp_path, make, answers):
    record = RunRecord(MachineLoad(2, 1, [0.5], 1.5), {"mt_bench": 2}, 2, True, ["left"], ["warned"], 4)
    sampling = SamplingOptions(temperature=0.7, seed=3)
    written = make(answers, tmp_path.name, record=record, sampling=sampling, repeats="auto")
    write_folder(tmp_path, written)
    assert read(tmp_path) == written
    told = describe(written.conditions, written.record)
    assert told["decoding"] == "temperature 0.7, top_k 0, top_p 1.0, seed 3"
    assert told["machine"] == "cores 2, threads 1, before [0.5], during 1.5"
    assert told["bit-identical"] == "yes (rows in multiples of 4)"
    assert describe(written.conditions, replace(record, row_multiple=1))["bit-identical"] == "yes"
    assert told["programs in the answers"] == "were run in bubblewrap" and told["starts"] == "2"


def test_drafters_whose_names_are_alike_have_files_of_their_own_and_old_files_go(tmp_path, make, answers):
    own = {"none": answers["mt_bench"]["none"]}
    names = ["a b", "a_b", "a:b"]
    own |= {name: [replace(answer, drafter=name) for answer in answers["mt_bench"]["ctc"]] for name in names}
    write_folder(tmp_path, make({"gsm8k": answers["gsm8k"]}))
    (tmp_path / "answers" / "gsm8k" / "mine.jsonl").write_text("mine")
    write_folder(tmp_path, make({"mt_bench": own}))
    found = [(benchmark, answers[0].drafter) for benchmark, _, answers in read_answers(tmp_path)]
    assert sorted(found) == sorted(("mt_bench", name) for name in [*names, "none"])
    kept = [str(path.relative_to(tmp_path)) for path in (tmp_path / "answers.old").rglob("*") if path.is_file()]
    assert kept == ["answers.old/gsm8k/mine.jsonl"], "somebody else's files are kept"


SUMMARY = ("results", "mt_bench", 1)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((*SUMMARY, "tokens"), -1),
        ((*SUMMARY, "tokens"), True),
        ((*SUMMARY, "questions"), 0),
        ((*SUMMARY, "identical"), 5),
        ((*SUMMARY, "first_divergence"), [1, -1, 0]),
        ((*SUMMARY, "acceptance", "length"), None),
        ((*SUMMARY, "acceptance", "length"), {}),
        ((*SUMMARY, "acceptance", "length", "interval"), True),
        ((*SUMMARY, "acceptance", "length", "interval"), [True, True]),
        ((*SUMMARY, "acceptance", "rates", 0, "rate", "value"), -0.5),
        ((*SUMMARY, "acceptance", "conventions", "block efficiency (Ouroboros)"), "3"),
        ((*SUMMARY, "speed", "speedup", "interval"), [1, float("nan")]),
        ((*SUMMARY, "speed", "seconds"), float("inf")),
        ((*SUMMARY, "by_category", "kind 1", "questions"), -3),
        (("conditions", "benchmarks", "mt_bench", "max_new_tokens"), -9),
        (("run", "starts"), True),
    ],
)
def test_figures_that_no_evaluation_can_have_are_refused_by_name(make_folder, path, value):
    file = Path(make_folder("a")) / "results.json"
    content = json.loads(file.read_text())
    place = content
    for key in path[:-1]:
        place = place[key]
    assert path[-1] in place
    place[path[-1]] = value
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"results.json: .*; run this version's `drafters eval` again") as error:
        read(file.parent)
    assert f"{path[-1]}" in str(error.value) or "answers cannot be identical" in str(error.value)


def test_a_folder_whose_answers_are_being_replaced_is_refused(make_folder):
    folder = make_folder("results")
    (Path(folder) / "answers.old").mkdir()
    with pytest.raises(ValueError, match="is being replaced: first repeat that `drafters eval`, without --overwrite"):
        read(folder)


def test_several_folders_have_names_of_their_own(make_folder, tmp_path):
    first = make_folder("a")
    (tmp_path / "other").mkdir()
    other = Path(first).rename(tmp_path / "other" / "a")
    names = [results.name for results in read_all([make_folder("a"), str(other), make_folder("b")])]
    assert names == [first, str(other), "b"]


@pytest.mark.parametrize(
    ("changes", "are_equal"),
    [
        ({}, True),
        ({"base": "large"}, False),
        ({"base_fingerprint": "b2"}, False),
        ({"base": "/home/me/tiny", "base_fingerprint": "a1"}, True),
        ({"sampling": SamplingOptions(0.5)}, False),
        ({"device": "cuda"}, False),
        ({"forward": "packed"}, False),
        ({"versions": {"torch": "2.14"}}, True),
        ({"cap": 99}, False),
        ({"benchmarks": {"mt_bench": BenchmarkConditions("abc", 8)}}, False),
    ],
)
def test_conditions_that_differ_are_named(make, answers, changes, are_equal):
    given = {"mt_bench": answers["mt_bench"]}
    first = make(given, "a", **({"base_fingerprint": "a1"} if "base_fingerprint" in changes else {}))
    assert (compare.differing_conditions(make(given, "b", **changes), first) == []) == are_equal
