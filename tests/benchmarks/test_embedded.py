import contextlib
import hashlib
import io
import json
import re
from collections import Counter

import pytest

from benchmarks.pretrain import embedded
from data.benchmarks import load_questions
from data.sources import read_rows

RECORDS = embedded.conversations(600, seed=0)
ANSWERS = [turn["value"] for record in RECORDS for turn in record["conversations"] if turn["from"] == "gpt"]


def test_what_ships_is_the_corpus():
    assert [row for _, row in read_rows("embedded")] == embedded.conversations(4000, 0)
    assert [list(each.turns) for each in load_questions("embedded")] == [row["turns"] for row in embedded.questions()]


def test_a_shorter_corpus_is_the_start_of_a_longer_one_and_another_seed_gives_another():
    assert embedded.conversations(20, seed=0) == RECORDS[:20]
    assert embedded.conversations(20, seed=4)[0]["conversations"] != RECORDS[0]["conversations"]


@pytest.mark.slow
def test_the_corpus_is_the_one_the_shipped_base_was_trained_on():
    content = json.dumps([embedded.conversations(3000, 0), embedded.questions()])
    assert hashlib.sha256(content.encode()).hexdigest().startswith("a23b5d72f054af3b"), "a new corpus needs a new base"


def results(answer):
    return re.findall(r"= (\d+)", answer)


def test_every_calculation_is_right_and_the_last_one_is_the_answer():
    calculations = re.findall(r"^(\d+(?: [*/+-] \d+)+) = (\d+)", "\n".join(ANSWERS), re.MULTILINE)
    assert len(calculations) > 500
    assert [line for line in calculations if eval(line[0]) != int(line[1])] == []
    endings = [answer for answer in ANSWERS if "The answer is" in answer]
    assert len(endings) > 100
    assert all(answer.endswith(f"The answer is {results(answer)[-1]}.") for answer in endings)


def test_every_program_prints_what_its_answer_says():
    programs = 0
    for answer in ANSWERS:
        code, claim = (
            re.search(r"```python\n(.*?)```", answer, re.DOTALL),
            re.search(r"example prints (.*?)( as before)?\.$", answer),
        )
        if code and claim:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(code[1], {})
            assert printed.getvalue().strip() == claim[1]
            programs += 1
    assert programs > 50


@pytest.mark.slow
def test_questions_are_balanced_two_turn_and_never_trained_on():
    rows = embedded.questions()
    assert [row["question_id"] for row in rows] == list(range(1, 41))
    assert set(Counter(row["category"] for row in rows).values()) == {8}
    assert all(len(row["turns"]) == 2 for row in rows)
    trained_on = {turn["value"] for record in embedded.conversations(8000, seed=0) for turn in record["conversations"]}
    trained_on |= {record["conversations"][0]["value"] for record in embedded.conversations(1500, 2024)}
    assert not trained_on & {row["turns"][0] for row in rows}
    with pytest.raises(ValueError, match=r"only \d+ different held-out questions, not 200"):
        embedded.questions(200)
