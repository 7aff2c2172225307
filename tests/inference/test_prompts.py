"""Which rows of which benchmarks a command decodes, and the questions whose prompts fit into the base's context."""

import json

import pytest
import torch

import drafters
from data.benchmarks import Question
from data.conversations import user_message
from inference.commands import evaluate, tune, verify
from inference.evaluate.results import read
from inference.options import QuestionOptions
from inference.prompts import encode_question
from inference.verifier.base import load_base_info
from inference.verifier.runner import Runner
from inference.verifier.session import Session
from train.arguments import grouped

CONTEXT = 64
LENGTHS = {1: 3, 2: 63, 3: 64, 4: 9, 5: 65, 6: 200, 7: 12}  # words of each question; 3, 5 and 6 do not fit
NOTE = "mt_bench: 3 of 7 questions, whose prompts do not fit into the base's context of 64 tokens: 3, 5, 6"


def question(number, words):
    return Question(number, "ab"[number % 2], (" ".join(f"w{5 + at * number % 30}" for at in range(words)),))


EVERY = [question(number, words) for number, words in LENGTHS.items()]


@pytest.fixture(scope="module")
def folder(make_base, toy_tokenizer, tmp_path_factory):
    """A folder with a base, a file of questions, and a file of those that fit."""
    folder = tmp_path_factory.mktemp("short")
    make_base(context=CONTEXT, dtype=torch.float32).model.save_pretrained(folder / "base")
    toy_tokenizer.save_pretrained(folder / "base")
    for name, numbers in {"every": LENGTHS, "fitting": {1, 2, 4, 7}, "long": {3, 5}}.items():
        rows = [{"question_id": q.question_id, "category": q.category, "turns": q.turns} for q in EVERY]
        lines = [json.dumps(row) + "\n" for row in rows if row["question_id"] in numbers]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def run(command, folder, questions="every", **arguments):
    usual = {"benchmark": [f"mt_bench={folder / questions}.jsonl"], "max_new_tokens": 20, "device": "cpu"}
    usual |= {"drafter": ["anpd", "joint"], "repeats": 1} if command is evaluate else {}
    command(**grouped(command, {"base": str(folder / "base")} | usual | arguments))


def results(out):
    found = read(out).summaries["mt_bench"]
    return {name: [each.questions, each.tokens, each.acceptance, each.identical] for name, each in found.items()}


@pytest.mark.slow
def test_the_questions_left_out_are_those_that_do_not_fit(make_base, folder):
    base = make_base(context=CONTEXT)
    options = QuestionOptions(["mt_bench"], max_new_tokens=20)
    asked = options.select(base, {"mt_bench": EVERY})["mt_bench"]
    assert {"mt_bench": asked} == options.select(load_base_info(str(folder / "base")), {"mt_bench": EVERY})
    session = Session(Runner(base), drafters.NoDrafter())
    assert [each.question_id for each in asked.questions] == [1, 2, 4, 7] and asked.left_out == [3, 5, 6]
    for prompt in asked.prompts:
        assert session.run(prompt, 20).tokens
    for each in (EVERY[at - 1] for at in asked.left_out):
        with pytest.raises(ValueError, match="the context of toy-llama ends at 64"):
            session.run(encode_question(base, each, [user_message(each.turns[0])], "tokenizer"), 20)
    assert asked.notes() == [NOTE] and options.select(base, {"mt_bench": EVERY[:1]})["mt_bench"].notes() == []


@pytest.mark.slow
def test_an_evaluation_skips_questions_that_do_not_fit_and_reports_them(folder, tmp_path, capsys):
    with pytest.raises(ValueError, match=r"mt_bench: none of 2 .* context of .* 64"):
        run(evaluate, folder, "long", out=str(tmp_path / "long"))
    run(evaluate, folder, "fitting", out=str(tmp_path / "fitting"))
    capsys.readouterr()
    run(evaluate, folder, out=str(tmp_path / "every"))
    assert results(tmp_path / "every") == results(tmp_path / "fitting")
    assert NOTE in " ".join(capsys.readouterr().out.split())
    assert NOTE in (tmp_path / "every" / "results.md").read_text()
    assert read(tmp_path / "every").record.left_out == [NOTE]
    assert NOTE.replace("'", "&#39;") in (tmp_path / "every" / "report.html").read_text()
    assert read(tmp_path / "fitting").record.left_out == []
    for path in (tmp_path / "every" / "answers").glob("*/*.jsonl"):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])  # it was stopped
    run(evaluate, folder, out=str(tmp_path / "every"))
    assert results(tmp_path / "every") == results(tmp_path / "fitting")


@pytest.mark.slow
def test_other_commands_leave_out_the_same_questions(folder, tmp_path, capsys):
    tuned = {"drafter": "anpd", "space": ["order=2"], "limit": None, "max_new_tokens": 20, "out": str(tmp_path)}
    benchmark = [f"mt_bench={folder / 'every.jsonl'}"]
    tune(**grouped(tune, {"base": str(folder / "base"), "benchmark": benchmark, "sampler": "grid", **tuned}))
    run(verify, folder, drafter=["anpd"])
    assert " ".join(capsys.readouterr().out.split()).count(NOTE) == 2


# ---- rows


@pytest.fixture
def file(tmp_path):
    rows = [{"question_id": number, "category": "a", "turns": [f"w{number}"]} for number in range(3, 15)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "q.jsonl"


@pytest.mark.parametrize("rows", [":", "2:5", "::4", "-3:", "5:2:-1"])
def test_rows_are_selected_as_python_slices_do(file, rows):
    (questions,) = QuestionOptions([f"mt_bench={file}"], rows=rows).load().values()
    expected = eval(f"list(range(3, 15))[{rows}]")
    assert [question.question_id for question in questions] == expected


def test_a_random_sample_depends_on_its_seed_alone_and_takes_every_row_as_often(file):
    def sample(rows):
        return [each.question_id for each in QuestionOptions([f"mt_bench={file}"], rows=rows).load()["mt_bench"]]

    samples = [sample(f"random:5:{seed}") for seed in range(300)]
    assert samples[:9] == [sample(f"random:5:{seed}") for seed in range(9)] and samples[0] == sample("random:5")
    assert all(len(set(each)) == 5 and each == sorted(each) for each in samples)
    assert all(90 < sum(row in each for each in samples) < 160 for row in range(3, 15))  # 125 are expected
    assert sample("random:99") == list(range(3, 15))


def test_each_benchmark_has_its_own_file_style_and_cap(file):
    options = QuestionOptions([f"mt_bench={file}", f"file={file}", "embedded"], limit=2)
    assert options.files() == {"mt_bench": str(file), "file": str(file), "embedded": None}
    assert list(options.load()) == ["mt_bench", "file", "embedded"]
    assert options.caps()["mt_bench"] == 512 and set(QuestionOptions(max_new_tokens=7).caps().values()) == {7}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"benchmark": ["embedded", "embedded"]}, "the benchmark embedded is named twice"),
        ({"limit": 0}, "limit must be at least 1, not 0"),
        *(({"rows": wrong}, "rows must be a slice such as") for wrong in ("", "3", "a:b", "1:2:3:4", "::0", "1.5:")),
        ({"rows": "random:5:a"}, "or random:COUNT"),
        ({"rows": "random:0"}, "--rows random:0 selects none of the 40 questions of embedded"),
        ({"rows": "9000:"}, "--rows 9000: selects none of the 40 questions of embedded"),
        ({"benchmark": ["nonsense"]}, "nonsense"),
    ],
)
def test_mistakes_are_found_before_a_base_is_loaded(options, said):
    with pytest.raises(ValueError, match=said):
        QuestionOptions(**options).load()
