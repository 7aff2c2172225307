"""The folders of evaluations: written, read back, and merged where they may be compared."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from inference.evaluate import answers as answer_files
from inference.evaluate import results
from inference.evaluate.plan import BenchmarkConditions, DrafterConditions
from inference.evaluate.results import RunRecord, is_comparable, read, read_all
from inference.timing import MachineLoad
from inference.verifier.options import SamplingOptions


def test_a_folder_is_read_back_as_it_was_written(tmp_path, make, answers):
    record = RunRecord(MachineLoad(2, 1, [0.5], 1.5), {"mt_bench": 2}, 2, True, ["left"], ["warned"], 4)
    sampling = SamplingOptions(temperature=0.7, seed=3)
    written = make(answers, tmp_path.name, record=record, sampling=sampling, repeats="auto")
    results.write(tmp_path, written)
    assert read(tmp_path) == written
    told = read(tmp_path).runs[tmp_path.name].describe()
    assert told["decoding"] == "temperature 0.7, top_k 0, top_p 1.0, seed 3"
    assert told["machine"] == "cores 2, threads 1, before [0.5], during 1.5"
    assert told["bit-identical"] == "yes (rows in multiples of 4)"
    assert told["programs in the answers"] == "were run in bubblewrap" and told["starts"] == "2"


def test_drafters_whose_names_are_alike_have_files_of_their_own_and_old_files_go(tmp_path, make, answers):
    own = {"none": answers["mt_bench"]["none"]}
    names = ["a b", "a_b", "a:b"]
    own |= {name: [replace(answer, drafter=name) for answer in answers["mt_bench"]["ctc"]] for name in names}
    stale, kept = (tmp_path / "answers" / "gsm8k" / name for name in ("ctc.jsonl", "mine.jsonl"))
    results.write(tmp_path, make({"gsm8k": answers["gsm8k"]}))
    kept.touch()
    results.write(tmp_path, make({"mt_bench": own}))
    files = (tmp_path / "answers" / "mt_bench").iterdir()
    assert sorted(answer_files.read(file)[0].drafter for file in files) == sorted([*names, "none"])
    assert not stale.exists() and kept.exists()


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
        ((*SUMMARY, "speed", "phase_seconds", "propose"), float("inf")),
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


def test_folders_of_the_same_conditions_share_a_table_and_keep_their_own_ratios(make_folder):
    (merged,) = read_all([make_folder("a", ["ctc"]), make_folder("b", ["ctc", "ngram"])])
    assert {name: summary.baseline for name, summary in merged.summaries["mt_bench"].items()} == {
        "none": "none",
        "ctc": "none",
        "none (b)": "none (b)",
        "ctc (b)": "none (b)",
        "ngram": "none (b)",
    }
    assert [s.is_baseline for s in merged.summaries["mt_bench"].values()] == [True, False, True, False, False]
    assert {own[0].drafter for own in merged.answers["mt_bench"].values()} == set(merged.summaries["mt_bench"])
    assert list(merged.runs) == ["a", "b"]


def test_runs_of_a_server_are_merged_by_drafter_and_requests_at_once(make, answers):
    def served(name, spec, levels):
        own = make({"mt_bench": answers["mt_bench"]}, name, specs={"ctc": spec}, engine="vLLM 0")
        by = own.summaries["mt_bench"]
        every = [replace(by[drafter], concurrency=level) for drafter in ("none", "ctc") for level in levels]
        return replace(own, summaries={"mt_bench": {each.name: each for each in every}}, answers={"mt_bench": {}})

    merged = results.merge([served("a", "ctc=old", [1, 2]), served("b", "ctc=new", [2, 8])])
    assert list(merged.summaries["mt_bench"]) == [
        *("none @ 1", "none @ 2", "ctc=old @ 1", "ctc=old @ 2"),
        *("none (b) @ 2", "none (b) @ 8", "ctc=new @ 2", "ctc=new @ 8"),
    ]


@pytest.mark.parametrize(
    ("changes", "is_mergeable"),
    [
        ({}, True),
        ({"base": "large"}, False),
        ({"base_fingerprint": "b2"}, False),
        ({"base": "/home/me/tiny", "base_fingerprint": "a1"}, True),
        ({"sampling": SamplingOptions(0.5)}, False),
        ({"devices": ["cuda:0"]}, False),
        ({"forward": "packed"}, False),
        ({"versions": {"torch": "2.14"}}, True),
        ({"cap": 99}, False),
        ({"benchmarks": {"mt_bench": BenchmarkConditions("def", 9)}}, False),
        ({"drafters": {"none": DrafterConditions("none"), "ctc": DrafterConditions("ctc", is_lossy=True)}}, False),
    ],
)
def test_only_evaluations_under_equal_conditions_are_merged(make, answers, changes, is_mergeable):
    given = {"mt_bench": answers["mt_bench"]}
    first = make(given, "a", **({"base_fingerprint": "a1"} if "base_fingerprint" in changes else {}))
    assert is_comparable(make(given, "b", **changes), first) == is_mergeable


def test_other_questions_or_another_baseline_text_never_share_a_ratio(make_folder, answers):
    first = make_folder("a")
    answers["mt_bench"] = {drafter: own[:3] for drafter, own in answers["mt_bench"].items()}
    assert len(read_all([first, make_folder("b")])) == 2
    assert len(read_all([first, make_folder("c", benchmark="gsm8k")])) == 1, "another benchmark is not a conflict"
