"""Quality of answers by exact match, ROUGE, BLEU, chrF and pass@1, to show that a drafter does not lower it."""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from functools import cache
from importlib.util import find_spec
from typing import NoReturn

from data.benchmarks import Question
from data.reasoning import ReasoningMarks
from inference.evaluate.answers import Answer

Runner = Callable[[str], bool]  # runs a program and tells whether it finished
NUMBER = r"(?<![\w.])-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
# The final answer in the form "#### 18" of GSM8K, or "### 18" of CTC-drafter's prompt; not a Markdown heading.
MARKED = re.compile(rf"#{{3,}}[ ]*({NUMBER})[ .$%]*$", re.MULTILINE)
JUDGEMENT_SECONDS = 10.0  # of processor time for one formula, most of which take milliseconds
FENCED = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)


def quality_of(
    benchmark: str,
    questions: Sequence[Question],
    answers: Sequence[Answer],
    run: Runner | None = None,
    marks: ReasoningMarks | None = None,
) -> dict[str, float]:
    """Score the first turns of recorded answers, without their reasoning.

    Args:
        benchmark: Name of the benchmark; a prompt style after a colon is ignored.
        questions: The questions.
        answers: Answers to them, in any order.
        run: Runs a program and tells whether it finished; None runs none and leaves out pass@1.
        marks: The marks of reasoning in the answers; None if there are none.

    Raises:
        ValueError: A question has no answer.
    """
    written = {answer.question_id: answer.turns[0].text for answer in answers if answer.turns}
    missing = [question.question_id for question in questions if question.question_id not in written]
    if missing:
        raise ValueError(f"{benchmark}: question {missing[0]} has no answer; answer the same questions")
    texts = [written[question.question_id] for question in questions]
    if marks:
        texts = [marks.without_reasoning(text) for text in texts]
    return score(benchmark, questions, texts, run)


def score(
    benchmark: str, questions: Sequence[Question], texts: Sequence[str], run: Runner | None = None
) -> dict[str, float]:
    """Score one text per question, in percent; empty if the benchmark has no reference answers.

    Spec-Bench is scored by task: mathematics, summaries and translations.

    Args:
        benchmark: As in `quality_of`.
        questions: The questions.
        texts: The answer to each question.
        run: As in `quality_of`.
    """
    name = benchmark.partition(":")[0]
    found: dict[str, float] = {}
    for measure, of in MEASURES.get(name, {}).items():
        pairs = [
            (question, _until(text, question.stops))
            for question, text in zip(questions, texts, strict=True)
            if (question.category == of or of is None) and question.reference is not None
        ]
        if not pairs:
            continue
        asked, written = map(list, zip(*pairs, strict=True))
        if measure is not pass_at_1:
            found |= measure(asked, written)
        elif run:
            found |= pass_at_1(asked, written, run)
    return found


def needs_code(benchmark: str) -> bool:
    """Whether the score of a benchmark comes from running the programs in its answers."""
    return pass_at_1 in MEASURES.get(benchmark.partition(":")[0], {})


def exact_match(questions: Sequence[Question], texts: Sequence[str]) -> dict[str, float]:
    """Percentage of answers whose final number equals that of the reference."""
    right = [
        final_number(text) is not None and final_number(text) == final_number(question.reference or "")
        for question, text in zip(questions, texts, strict=True)
    ]
    return {"exact match": 100 * sum(right) / len(right)}


def final_number(text: str) -> Decimal | None:
    """Return the number on the first line that ends in ``#### NUMBER`` or ``### NUMBER``, else the text's last number.

    >>> final_number("He pays $1,200.50 for 3.")
    Decimal('3')
    """
    marked = MARKED.search(text)
    numbers = [marked[1]] if marked else re.findall(NUMBER, text)
    return Decimal(re.sub(r"[$,]", "", numbers[-1])) if numbers else None


def boxed_match(questions: Sequence[Question], texts: Sequence[str]) -> dict[str, float]:
    """Percentage of answers whose final formula equals the reference, as math-verify judges; empty without it.

    Formulas that take it longer than `JUDGEMENT_SECONDS` are left out; ``not judged`` is the percentage of them.
    """
    if not has_math_verify():
        return {}
    judgements = [
        is_right_formula(question.reference or "", text) for question, text in zip(questions, texts, strict=True)
    ]
    judged = [is_right for is_right in judgements if is_right is not None]
    found = {"exact match": 100 * sum(judged) / len(judged)} if judged else {}
    num_missing = len(judgements) - len(judged)
    return found | ({"not judged": 100 * num_missing / len(judgements)} if num_missing else {})


class _Expired(BaseException):
    """Ends a judgement; math-verify catches every Exception."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `_Expired` in the block once the process has computed for this long; other threads have no limit."""

    def stop(*_: object) -> NoReturn:
        raise _Expired

    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield
        return
    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


@cache
def is_right_formula(reference: str, text: str) -> bool | None:
    """Whether the final formula of a text equals the reference; None if that takes longer than `JUDGEMENT_SECONDS`.

    Equal texts, as lossless drafters write them, are judged once. The timeouts of math-verify are not used: they count
    wall time, so a busy machine would make right answers wrong, and they work only in the main thread.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no timeouts
    try:
        with _time_limit(JUDGEMENT_SECONDS):
            return bool(verify(_parsed_reference(reference), parse(text, parsing_timeout=None), timeout_seconds=None))
    except _Expired:
        return None


@cache
def _parsed_reference(reference: str) -> list:
    from math_verify import parse

    return list(parse(f"\\boxed{{{reference}}}", parsing_timeout=None))


def has_math_verify() -> bool:
    """Whether the library is installed that scores mathematics (the extra ``maths``)."""
    return find_spec("math_verify") is not None


def needs_math_verify(benchmark: str) -> bool:
    """Whether the score of a benchmark needs math-verify, which is not installed."""
    return boxed_match in MEASURES.get(benchmark.partition(":")[0], {}) and not has_math_verify()


def rouge(questions: Sequence[Question], texts: Sequence[str]) -> dict[str, float]:
    """Mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L with stemming (Lin 2004), computed by rouge-score."""
    from rouge_score.rouge_scorer import RougeScorer

    names = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
    scorer = RougeScorer(list(names), use_stemmer=True)
    scores = [scorer.score(question.reference, text) for question, text in zip(questions, texts, strict=True)]
    return {names[key]: 100 * sum(one[key].fmeasure for one in scores) / len(scores) for key in names}


def translation(questions: Sequence[Question], texts: Sequence[str]) -> dict[str, float]:
    """Corpus BLEU and chrF with sacrebleu's defaults."""
    import sacrebleu

    references = [[question.reference or "" for question in questions]]
    return {
        "BLEU": sacrebleu.corpus_bleu(list(texts), references).score,
        "chrF": sacrebleu.corpus_chrf(list(texts), references).score,
    }


def pass_at_1(questions: Sequence[Question], texts: Sequence[str], run: Runner | None = None) -> dict[str, float]:
    """Percentage of programs that pass their tests, one program per task (Chen et al. 2021 with n = k = 1)."""
    assert run
    passed = [run(program(question, text)) for question, text in zip(questions, texts, strict=True)]
    return {"pass@1": 100 * sum(passed) / len(passed)}


def program(question: Question, text: str) -> str:
    """Return the program of an answer: the prefix that it continues, its code, and the tests.

    If the answer has fenced code blocks, its code is the first block that defines the required function, or else the
    first block.
    """
    assert question.checks is not None, f"question {question.question_id} has no tests"
    prefix, entry_point = question.checks.prefix, question.checks.entry_point
    blocks = FENCED.findall(text)
    defines = re.compile(rf"^(?:async )?def {re.escape(entry_point)}\b" if entry_point else r"^def ", re.MULTILINE)
    code = next((block for block in blocks if defines.search(block)), blocks[0] if blocks else text)
    if prefix and not defines.search(code):
        code = _indented_like(prefix, code)
    # The prefix stays even if the code defines the function, because it may contain imports and other functions.
    return f"{prefix}{code}\n\n{question.checks.tests}\n"


def _indented_like(prefix: str, code: str) -> str:
    """Restore the indentation of the first line, which decoding or stripping may have removed."""
    last = prefix.rstrip("\n").rpartition("\n")[2]
    indentation = last[: len(last) - len(last.lstrip())]
    return code if code.startswith((indentation, "\n")) else indentation + code.lstrip(" ")


def _until(text: str, stops: Sequence[str]) -> str:
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


Measure = Callable[[Sequence[Question], Sequence[str]], dict[str, float]]
# By benchmark: the measures, and the category that each applies to (None for all questions).
MEASURES: dict[str, dict[Measure, str | None]] = {
    "gsm8k": {exact_match: None},
    **{name: {boxed_match: None} for name in ("math500", "aime24", "aime25", "aime26")},
    "humaneval": {pass_at_1: None},
    "humaneval_plus": {pass_at_1: None},
    "mbpp_plus": {pass_at_1: None},
    "mbpp": {pass_at_1: None},
    "mbpp_validation": {pass_at_1: None},
    "cnn_dm": {rouge: None},
    "xsum": {rouge: None},
    "wmt16": {translation: None},
    "spec_bench": {exact_match: "math_reasoning", rouge: "summarization", translation: "translation"},
}
