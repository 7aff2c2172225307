"""Quality scores of answers, against values computed by hand and the real references."""

import ctypes
import json
import os
import struct
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from data.benchmarks import Checks, Question
from data.templates import ReasoningMarks
from inference.evaluation.evaluate import EvaluationOptions, evaluate
from inference.evaluation.quality import quality_of
from inference.evaluation.question_options import BenchmarkOptions
from inference.results.records import Answer, Turn
from inference.sandbox.sandbox import choose_isolation, held_locks
from inference.verifier.options import ModelOptions, SamplingOptions

ISOLATION = choose_isolation(allow_weak=True)
ADD = Checks(
    'import math\n\n\ndef one():\n    return 1\n\n\ndef add(a):\n    """Add one."""\n', "add", "assert add(2) == 3"
)


def questions(*references, category="math"):
    return [Question(index, category, ("?",), reference) for index, reference in enumerate(references)]


@pytest.fixture
def code_file(tmp_path):
    row = {"task_id": "HumanEval/0", "prompt": "def w5():\n", "entry_point": "w5"}
    row |= {"canonical_solution": "    pass", "test": "def check(candidate):\n    pass"}
    (tmp_path / "code.jsonl").write_text(json.dumps(row))
    return str(tmp_path / "code.jsonl")


def code(checks=ADD, stops=()):
    return Question(0, "coding", ("?",), "a", checks, stops=stops)


def test_recorded_answers_are_scored_by_their_first_turn_in_the_order_of_the_questions():
    asked = questions("#### 1", "#### 2")

    def answer(number, *texts):
        turns = [Turn(text, [], 1, [], 1.0) for text in texts]
        return Answer(number, "math", "none", turns, [True] * len(turns))

    assert quality_of("gsm8k", asked, [answer(1, "2", "9"), answer(0, "1")]) == {"exact match": 100.0}
    with pytest.raises(ValueError, match="gsm8k: question 1 has no answer"):
        quality_of("gsm8k", asked, [answer(0, "1")])


def test_only_what_follows_the_reasoning_is_scored():
    def graded(text, benchmark="gsm8k", asked=None, is_open=False):
        answer = Answer(0, "math", "none", [Turn(text, [], 1, [], 1.0)], [True])
        marks = ReasoningMarks(("<think>", "</think>"), (5,), (8,), is_open)
        return quality_of(benchmark, asked or questions("#### 5"), [answer], ISOLATION, marks)

    right, wrong = {"exact match": 100}, {"exact match": 0}
    assert graded("<think>Perhaps\n#### 4\n</think>\n\n#### 5") == right
    assert graded("Perhaps\n#### 4\n</think>\n\n#### 5", is_open=True) == right
    assert graded("<think>It is\n#### 5\n") == graded("It is\n#### 5\n", is_open=True) == wrong, "it has no end"
    assert graded("#### 5") == right
    draft, final = (f"```python\ndef add(a):\n    return {value}\n```\n" for value in ("a", "a + 1"))
    assert graded(f"<think>{draft}</think>{final}", "humaneval", [code()]) == {"pass@1": 100}
    assert graded(f"<think>{final}</think>{draft}", "humaneval", [code()]) == {"pass@1": 0}


@pytest.mark.slow
def test_drafters_eval_writes_the_quality_of_every_drafter(tmp_path, make_base, toy_tokenizer, code_file, capsys):
    make_base(context=256).model.float().save_pretrained(tmp_path / "base")
    toy_tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "w5 w6 w7", "answer": "#### 2"}) + "\n")
    rows = [json.dumps({"question": f"w{n} w5", "answer": "w6"}) for n in range(9, 17)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    questions = [f"{tmp_path / 'test.jsonl'},{tmp_path / 'train.jsonl'}", code_file]
    evaluate(
        ModelOptions(str(tmp_path / "base"), device="cpu"),
        BenchmarkOptions(["gsm8k:shots", "humaneval:completion"], questions, max_new_tokens=8),
        SamplingOptions(),
        EvaluationOptions(["prompt_lookup"], repeats=1, allow_code_execution=True, allow_weak_sandbox=True),
        out=str(tmp_path / "out"),
    )
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    for benchmark, measure in (("gsm8k:shots", "exact match"), ("humaneval:completion", "pass@1")):
        results = written["results"][benchmark]
        assert [set(of["quality"]) for of in results.values()] == [{measure}] * 2
        assert results["none"]["quality"] == results["prompt_lookup"]["quality"]  # lossless
    sandbox = ", ".join(held_locks(ISOLATION))
    assert written["context"]["sandbox"] == sandbox
    assert sandbox in " ".join(capsys.readouterr().out.split())
    for page in ("results.md", "report.html"):
        text = (tmp_path / "out" / page).read_text()
        assert all(part in text for part in ("exact match", "pass@1", sandbox))


def leave_landlock_and_bubblewrap():
    """Make this process one of a machine that has neither: the kernel knows no Landlock, and no bwrap is installed."""
    os.environ["PATH"] = ""
    held_locks.cache_clear()
    landlock, unknown, allowed = 444, 0x50026, 0x7FFF0000
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, landlock), (0x06, 0, 0, unknown), (0x06, 0, 0, allowed)]  # a seccomp filter
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = struct.pack("HP", len(code), ctypes.addressof(instructions))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0


def evaluate_code(file, allow_weak):
    evaluate(
        ModelOptions("no base"),
        BenchmarkOptions(["humaneval"], [file]),
        SamplingOptions(),
        EvaluationOptions(allow_code_execution=True, allow_weak_sandbox=allow_weak),
    )


def test_without_bubblewrap_and_landlock_code_is_run_only_where_a_weak_sandbox_is_allowed(code_file):
    with ProcessPoolExecutor(1, get_context("fork"), leave_landlock_and_bubblewrap) as process:
        refused = process.submit(evaluate_code, code_file, False).exception()
        assert isinstance(refused, ValueError) and "--allow-weak-sandbox" in str(refused) and "\n" not in str(refused)
        allowed = process.submit(evaluate_code, code_file, True).exception()
        assert "no base" in str(allowed), "the next mistake"
        assert process.submit(choose_isolation, True).result() in ("seccomp", "hook")
