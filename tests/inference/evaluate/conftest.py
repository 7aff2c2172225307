"""Evaluations made of answers whose steps emit given numbers of tokens."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from inference.evaluate import results
from inference.evaluate.answers import Answer, AnswerFiles, Turn
from inference.evaluate.conditions import BenchmarkConditions, DrafterConditions, RunConditions, RunRecord
from inference.evaluate.figures import summarise
from inference.evaluate.results import EvaluationResults
from inference.verifier.session import Step

WORDS = ["The", " cat", " <script>alert(1)</script>", "\n sat", " & on", " a", " mat", ".", "</s>"]
STEPS = {"none": [1] * 9, "ctc": [1, 4, 3, 1], "ngram": [1, 2, 2, 2, 2]}  # emitted tokens of each step
CONDITIONS = RunConditions(
    base="tiny|chat",
    base_fingerprint="",
    dtype="float32",
    engine="drafters",
    device="cpu",
    machine="a machine",
    threads=1,
    versions={"torch": "2.13"},
    template="tokenizer",
)


def decode(token_ids):
    return "".join(WORDS[token] for token in token_ids)


def make_answer(drafter, question_id, category="all", token_ids=tuple(range(9)), emitted=None):
    emitted = emitted or STEPS[drafter]
    costs = [Step(n, n - 1, 1, 4, 0, 0, (0.001, 0.1, 0.001, 0.001, 0.001)) for n in emitted]
    turn = Turn(decode(token_ids).removesuffix("</s>"), list(token_ids), 5, costs, 0.11 * len(costs), True)
    return Answer(question_id, category, drafter, [turn, turn])


def two_benchmarks():
    """Answers to two benchmarks; in the second, ngram writes a different fourth token."""
    given = {
        name: {drafter: [make_answer(drafter, q, f"kind {q % 2}") for q in range(1, 5)] for drafter in STEPS}
        for name in ("mt_bench", "gsm8k")
    }
    given["gsm8k"]["ngram"][2] = make_answer("ngram", 3, "kind 1", (0, 1, 2, 5, 4, 5, 6, 7, 8))
    return given


def make_evaluation(answers, name="a", specs=None, cap=9, record=None, **changes):
    """An evaluation with these answers, by benchmark and drafter.

    Args:
        answers: The answers.
        name: Name of its folder.
        specs: Specs of drafters, if they are not their names.
        cap: The length cap of all benchmarks.
        record: What happened in it.
        changes: Its conditions.
    """
    names = dict.fromkeys(drafter for by_drafter in answers.values() for drafter in by_drafter)
    drafters = {drafter: DrafterConditions((specs or {}).get(drafter, drafter)) for drafter in names}
    benchmarks = {benchmark: BenchmarkConditions("abc", cap) for benchmark in answers}
    changes = {"drafters": drafters, "benchmarks": benchmarks} | changes
    record = record or RunRecord(date="2026-11-25", command=f"drafters eval <{name}>")
    summaries = {name: {each: summarise([of[each]], [of["none"]]) for each in of} for name, of in answers.items()}
    return EvaluationResults(replace(CONDITIONS, **changes), record, summaries, answers, name)


def write_folder(folder, evaluation):
    """Write what `drafters eval --out` writes of an evaluation, but for tables and the page."""
    files = AnswerFiles(folder, asdict(evaluation.conditions), overwrite=True)
    files.add_event({})
    for benchmark, by_drafter in evaluation.answers.items():
        for answer in (answer for answers in by_drafter.values() for answer in answers):
            files.add(benchmark, answer)
    files.finish()
    results.write(folder, evaluation)


@pytest.fixture
def answers():
    return two_benchmarks()


@pytest.fixture
def evaluation():
    """The evaluation of two benchmarks."""
    return make_evaluation(two_benchmarks())


@pytest.fixture
def make():
    return make_evaluation


@pytest.fixture
def make_folder(tmp_path, answers):
    """Write the folder of `drafters eval --out` for some of the drafters of one benchmark."""

    def make_folder(name, drafters=("ctc", "ngram"), benchmark="mt_bench", **options):
        given = {benchmark: {each: answers[benchmark][each] for each in ("none", *drafters)}}
        write_folder(tmp_path / name, make_evaluation(given, name, **options))
        return str(tmp_path / name)

    return make_folder


@pytest.fixture
def words():
    """The words of the answers, and the function that joins them."""
    return SimpleNamespace(words=WORDS, decode=decode)
