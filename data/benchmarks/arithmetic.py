"""GSM8K, whose answers are numbers, and MATH-500 and AIME, whose answers are formulas in a box."""

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


# The instruction that Qwen's and DeepSeek's model cards give for mathematics, and copies of these sets contain.
BOX_INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def read_boxed(row: Mapping, index: int) -> Question:
    """Read a row with a problem (or a prompt that may end with the instruction), an answer and perhaps a subject.

    The id is the index in the file.
    """
    problem = text(row, "problem", "prompt").removesuffix(BOX_INSTRUCTION)
    answer = row["answer"]
    if isinstance(answer, bool) or not isinstance(answer, (str, int)):
        raise ValueError("answer is neither a text nor an integer")
    return Question(index, str(row.get("subject") or "math"), (problem,), str(answer))


def _boxed(hub: Hub | None, download: str, max_new_tokens: int) -> Benchmark:
    return Benchmark(
        hub,
        download,
        "problem (or prompt), answer",
        read_boxed,
        max_new_tokens,
        styles={
            "boxed": Style(
                "the problem, then the request to reason step by step and to put the answer in a box",
                lambda question, shots: question.turns[0] + BOX_INSTRUCTION,
            ),
            "plain": Style("the problem alone", lambda question, shots: question.turns[0]),
        },
    )


BENCHMARKS = {
    "math500": _boxed(
        Hub("HuggingFaceH4/MATH-500", None, "test", revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be"),
        "test.jsonl of HuggingFaceH4/MATH-500",
        max_new_tokens=1024,
    ),
    "aime24": _boxed(
        Hub("HuggingFaceH4/aime_2024", None, "train", revision="2fe88a2f1091d5048c0f36abc874fb997b3dd99a"),
        "the problems of AIME 2024 as JSONL",
        max_new_tokens=2048,
    ),
    "aime25": _boxed(
        Hub("math-ai/aime25", None, "test", revision="563bb8404243c5f09de6ec262f2db674fe5bce9b"),
        "test.jsonl of math-ai/aime25",
        max_new_tokens=2048,
    ),
    "aime26": _boxed(
        Hub("MathArena/aime_2026", None, "train", revision="d2de22f3c656b4f56cf8981212186377d1e23bc3"),
        "the problems of AIME 2026 as JSONL",
        max_new_tokens=2048,
    ),
    "gsm8k": Benchmark(
        Hub("openai/gsm8k", "main", "test", "train", "740312add88f781978c0658806c59bc2815b9866"),
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
    ),
}
