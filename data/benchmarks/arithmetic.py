"""GSM8K: grade-school mathematics problems whose answer is a number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from data.benchmarks.question import AS_IT_IS, Benchmark, Hub, Question, Style, text

# The instruction before each question in the GSM8K evaluation released with CTC-drafter (Apache-2.0).
CTC_INSTRUCTION = (
    "Please carefully read the following math question, give a solution and the final answer"
    "(put the final answer after ### at the end): "
)


def read(row: Mapping, index: int) -> Question:
    """Read a row of GSM8K: question, answer. The id is the index in the file."""
    return Question(index, "math", (text(row, "question"),), text(row, "answer"))


def after_shots(question: Question, shots: Sequence[Question]) -> str:
    """Build a few-shot prompt in the Q and A form that Ouroboros uses with eight examples."""
    shown = "".join(f"Q: {shot.turns[0]}\nA: {shot.reference}\n\n" for shot in shots)
    return f"{shown}Q: {question.turns[0]}\nA:"


BENCHMARKS = {
    "gsm8k": Benchmark(
        Hub("openai/gsm8k", "main", "test", "train"),
        "test.jsonl of openai/grade-school-math",
        "question, answer",
        read,
        max_new_tokens=256,
        styles={
            **AS_IT_IS,
            "ctc": Style(
                "the instruction released with CTC-drafter, then the question",
                lambda question, shots: CTC_INSTRUCTION + question.turns[0],
            ),
            "shots": Style(
                "eight examples of the train split, then `Q: ... A:`, without a chat template",
                after_shots,
                num_shots=8,
                is_raw=True,
                stops=("\nQ:",),
            ),
        },
    )
}
