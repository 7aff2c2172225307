import json
from pathlib import Path

import datasets
import pytest

from data import embedded
from data.benchmarks import NAMES, Question, load

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
MT_BENCH = [{"question_id": 81 + n, "category": "writing", "turns": [f"Ask {n}", "Again"]} for n in range(4)]
GSM8K = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(4)]


@pytest.fixture
def write(tmp_path):
    def write(rows):
        path = tmp_path / "questions.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write


def test_mt_bench_keeps_its_ids_and_turns(write):
    questions = load("mt_bench", write(MT_BENCH), offset=1, limit=2)
    assert [question.question_id for question in questions] == [82, 83]
    assert questions[0] == Question(82, "writing", ("Ask 1", "Again"), None)


def test_gsm8k_ids_are_places_in_the_file_and_the_prompt_is_the_question_alone(write):
    assert load("gsm8k", write(GSM8K), offset=2) == [
        Question(2, "math", ("What is 2 + 1?",), "#### 3"),
        Question(3, "math", ("What is 3 + 1?",), "#### 4"),
    ]


def test_the_embedded_benchmark_asks_the_held_out_questions():
    assert [list(question.turns) for question in load("embedded")] == [row["turns"] for row in embedded.questions()]


@pytest.mark.parametrize(
    ("name", "rows", "reason"),
    [
        ("mt_bench", [MT_BENCH[0], "{"], "line 2: invalid JSON"),
        ("mt_bench", [MT_BENCH[0], GSM8K[0]], r"line 2: not a question of mt_bench, expected the fields question_id"),
        ("mt_bench", [{"question_id": 1, "category": "x", "turns": "text"}], "line 1.*turns is not a list"),
        ("gsm8k", [*GSM8K, MT_BENCH[0]], "line 5: not a question of gsm8k, expected the fields question, answer"),
        ("gsm8k", ["[]"], "line 1: not a question"),
        ("gsm8k", [], "no question selected"),
    ],
)
def test_a_malformed_file_is_named_with_its_line(write, name, rows, reason):
    with pytest.raises(ValueError, match=reason):
        load(name, write(rows))


def test_an_offset_past_the_end_selects_nothing_and_says_so(write):
    with pytest.raises(ValueError, match="gsm8k has 4, offset is 9"):
        load("gsm8k", write(GSM8K), offset=9)


@pytest.mark.parametrize(("offset", "limit"), [(-1, None), (-1, 2), (0, 0), (0, -1)])
def test_a_part_that_is_no_part_is_refused(write, offset, limit):
    with pytest.raises(ValueError, match=f"at least 0 and limit at least 1, not {offset} and {limit}"):
        load("gsm8k", write(GSM8K), offset, limit)


def test_a_file_in_another_encoding_is_named(tmp_path):
    file = tmp_path / "latin.jsonl"
    file.write_bytes('{"question": "Grüße", "answer": ""}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.jsonl is not UTF-8"):
        load("gsm8k", str(file))


def test_an_unknown_benchmark_and_a_missing_file_are_named(tmp_path):
    with pytest.raises(ValueError, match=f"'mtbench'; choose one of: {', '.join(NAMES())}"):
        load("mtbench")
    with pytest.raises(ValueError, match="no such file"):
        load("gsm8k", str(tmp_path / "nowhere.jsonl"))


@pytest.mark.parametrize("name", ["gsm8k", "mt_bench"])
def test_without_the_hub_the_user_hears_what_to_download(name, monkeypatch):
    def unreachable(*arguments, **options):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"cannot reach .*; download .* and pass --questions FILE"):
        load(name)


def test_the_hubs_form_of_mt_bench_is_read(monkeypatch):
    row = {"prompt": ["a", "b"], "category": "math", "prompt_id": 7, "reference": []}
    monkeypatch.setattr(datasets, "load_dataset", lambda *arguments, **options: [row])
    assert load("mt_bench") == [Question(7, "math", ("a", "b"), None)]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real benchmarks do not stand beside the project")
def test_the_real_files_are_read():
    assert len(load("mt_bench", str(SHARED / "mt_bench" / "question.jsonl"))) == 80
    questions = load("gsm8k", str(SHARED / "gsm8k" / "test.jsonl"))
    assert len(questions) == 1319 and questions[-1].question_id == 1318 and "####" in questions[0].reference
