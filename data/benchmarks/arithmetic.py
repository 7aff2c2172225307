"""GSM8K: school mathematics, answered with a number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from data.benchmarks.question import AS_IT_IS, Benchmark, Hub, Question, Style, text

# The instruction that CTC-drafter's released GSM8K questions begin with (its evaluation/GSM8K, Apache-2.0).
CTC_INSTRUCTION = (
    "Please carefully read the following math question, give a solution and the final answer"
    "(put the final answer after ### at the end): "
)


def read(row: Mapping, index: int) -> Question:
    """Read the columns of the file and of the hub: question, answer. The id is the place in the file."""
    return Question(index, "math", (text(row, "question"),), text(row, "answer"))


def after_shots(question: Question, shots: Sequence[Question]) -> str:
    """Ask after worked examples, in the Q and A form that Ouroboros uses with its eight."""
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
                "the instruction of CTC-drafter's released questions, then the question",
                lambda question, shots: CTC_INSTRUCTION + question.turns[0],
            ),
            "shots": Style(
                "eight questions and answers of the train part, then `Q: ... A:`, without a chat template",
                after_shots,
                num_shots=8,
                is_raw=True,
                stops=("\nQ:",),
            ),
        },
    )
}
