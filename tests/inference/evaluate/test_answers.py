"""Recorded answers: a round trip, and the fields that other tools read."""

import json
from dataclasses import replace

import pytest

from data.benchmarks import Question
from data.templates import ReasoningMarks
from inference.evaluate import answers as records
from inference.evaluate.answers import Answer, AnswerFiles, Turn, read_answers
from inference.evaluate.run import with_scores
from inference.prompts import BenchmarkPrompts
from inference.verifier.session import Step

PREFILL = Step(1, 0, 9, 0, 0, 0, (0.0, 0.5, 0.0, 0.0, 0.0))
STEP = Step(3, 2, 1, 4, 3, 1, (0.01, 0.1, 0.02, 0.03, 0.04))
ANSWER = Answer(
    question_id=81,
    category="writing",
    drafter="ctc",
    turns=[
        Turn("Grüße,\n日本 </s>", [5, 6, 7, 8], 9, [PREFILL, STEP], 0.75, True),
        Turn("Yes.", [1, 2, 3, 4, 5, 6, 7], 20, [PREFILL, STEP, STEP], 1.25, False),
    ],
)


def test_answers_come_back_as_they_were_written(tmp_path):
    other = Answer(82, "math", "none", [Turn("4", [4], 3, [PREFILL], 0.5, True)], peak_bytes=1 << 30)
    served = Turn("from a server", [3, 4], 4, [], 0.5, False, arrivals=[(0.1, 1), (0.5, 1)])
    turns = [replace(other.turns[0], cpu_seconds=[0.25]), served]
    other = replace(other, turns=turns)
    for folder in (tmp_path, None):
        files = AnswerFiles(folder, {"base": "x"})
        files.add_event({"start": 1})
        for answer in (ANSWER, other, replace(ANSWER, repeat=1, load=0.5)):
            files.add("b", answer)
        assert files.answers("b", "ctc") == {(0, 81): ANSWER, (1, 81): replace(ANSWER, repeat=1, load=0.5)}
        assert files.answers("b", "none") == {(0, 82): other}
    found = {name: answers for name, _, answers in read_answers(tmp_path)}
    again = AnswerFiles(tmp_path, {"base": "x"})
    assert found == {"b": [other]} and again.all_answers() == files.all_answers() and again.events == [{"start": 1}]


def test_repeats_are_complete_up_to_the_first_that_lacks_a_question():
    recorded = {(repeat, number): ANSWER for repeat, number in ((0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (3, 1), (3, 2))}
    assert len(records.complete_repeats(recorded, [1, 2])) == 2 and len(records.complete_repeats(recorded, [1])) == 4
    assert records.complete_repeats(recorded, []) == [], "also where a damaged file lacks the first repeat"


def test_an_answer_has_the_fields_fastchat_and_spec_bench_read():
    line = json.loads(json.dumps(records.to_json(ANSWER)))
    assert (line["question_id"], line["model_id"], line["category"]) == (81, "ctc", "writing")
    assert line["answer_id"] and line["tstamp"] > 0
    (choice,) = line["choices"]
    assert choice["index"] == 0
    assert choice["turns"] == ["Grüße,\n日本 </s>", "Yes."]
    assert choice["idxs"] == [1, 2]  # zero-based index of the last step
    assert choice["new_tokens"] == [4, 7]
    assert choice["wall_time"] == [0.75, 1.25]
    assert choice["accept_lengths"] == [3, 3, 3]  # of the steps after the prefill
    assert choice["steps"][0][1] == [3, 2, 1, 4, 3, 1, 0.01, 0.1, 0.02, 0.03, 0.04]


def test_seconds_are_rounded_to_a_tenth_of_a_microsecond():
    turn = Turn("", [1], 1, [Step(1, 0, 1, 0, 0, 0, (1 / 3,) * 5)], 2 / 3, True)
    choice = records.to_json(Answer(1, "math", "ctc", [turn]))["choices"][0]
    assert choice["wall_time"] == [0.6666667]
    assert choice["steps"][0][0][6:] == [0.3333333] * 5


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("token_ids", [["x"], [1]]),
        ("wall_time", ["soon", 1.0]),
        ("wall_time", [-1.0, 1.0]),
        ("wall_time", [True, 1.0]),
        ("prompt_tokens", [-1, 1]),
        ("steps", [[[1] * 3], []]),
        ("steps", [[[-1] * 11], []]),
        ("ended", [True]),
        ("step_cpu_times", [[0.1], []]),
    ],
)
def test_a_value_of_another_type_is_refused_before_anything_computes_with_it(tmp_path, key, value):
    record = records.to_json(ANSWER)
    (tmp_path / "answers" / "b").mkdir(parents=True)
    path = tmp_path / "answers" / "b" / "ctc.jsonl"
    path.write_text(json.dumps(record) + "\n")
    record["choices"][0][key] = value
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
    with pytest.raises(ValueError, match=r"ctc\.jsonl line 2: .*; delete the file and start over"):
        list(read_answers(tmp_path))


@pytest.mark.parametrize(
    ("text", "is_open", "percent"),
    [
        ("<think>Perhaps\n#### 4\n</think>\n\n#### 5", False, 100),
        ("Perhaps\n#### 4\n</think>\n\n#### 5", True, 100),
        ("<think>It is\n#### 5\n", False, 0),
        ("#### 5", False, 100),
    ],
)
def test_what_follows_the_reasoning_of_the_first_turn_is_scored(make, text, is_open, percent):
    second = Turn("#### 9", [7], 1, [PREFILL], 1.0, True)
    firsts = [Turn(text, [7], 1, [PREFILL], 1.0, is_ended) for is_ended in (True, False)]
    given = [Answer(number, "math", "none", [first, second]) for number, first in enumerate(firsts)]
    found = make({"gsm8k": {"none": given}})
    asked = {"gsm8k": BenchmarkPrompts("gsm8k", 99, [Question(n, "math", ("?", "?"), "#### 5") for n in range(2)])}
    marks = ReasoningMarks(("<think>", "</think>"), (5,), (8,), is_open)
    scored = with_scores(found, asked, False, marks)
    assert scored.summaries["gsm8k"]["none"].quality == {"exact match": percent}
    assert scored.record.warnings == ["50 % of the scored answers of gsm8k were cut at 9 tokens"]
