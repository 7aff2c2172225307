"""Quality of recorded answers, as their benchmark scores it, to show that a drafter does not lower it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

from data.benchmarks import Question, score
from data.templates import ReasoningMarks
from inference.results.records import Answer
from inference.sandbox.sandbox import Isolation, run


def quality_of(
    benchmark: str,
    questions: Sequence[Question],
    answers: Sequence[Answer],
    isolation: Isolation | None = None,
    marks: ReasoningMarks | None = None,
) -> dict[str, float]:
    """Score the first turns of recorded answers, without their reasoning.

    Args:
        benchmark: Name of the benchmark; a prompt style after a colon is ignored.
        questions: The questions.
        answers: Answers to them, in any order.
        isolation: What isolates the programs in the answers while they run; None runs none and leaves out pass@1.
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
    return score(benchmark, questions, texts, partial(finishes, isolation=isolation) if isolation else None)


@lru_cache(maxsize=4096)
def finishes(program: str, isolation: Isolation) -> bool:
    """Run a program in the sandbox. Equal programs, as lossless drafters write them, are run once."""
    return run(program, isolation=isolation).has_finished
