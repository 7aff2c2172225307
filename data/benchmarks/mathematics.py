"""GSM8K, whose answers are numbers, and MATH-500 and AIME, whose answers are formulas in a box."""

import logging
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import cache

from data.benchmarks.question import Benchmark, Question, Style, text
from data.computing_limit import computing_limit

# The instruction before each question in the GSM8K evaluation released with CTC-drafter (Apache-2.0).
CTC_INSTRUCTION = (
    "Please carefully read the following math question, give a solution and the final answer"
    "(put the final answer after ### at the end): "
)
# The instruction that Qwen's and DeepSeek's model cards give for mathematics, and copies of these sets contain.
BOX_INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
NUMBER = r"(?<![\w.])-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
# The final answer in the form "#### 18" of GSM8K, or "### 18" of CTC-drafter's prompt; not a Markdown heading.
MARKED = re.compile(rf"#{{3,}}[ ]*({NUMBER})[ .$%]*$", re.MULTILINE)
JUDGEMENT_SECONDS = 10.0  # of processor time for one formula, most of which take milliseconds


def read_gsm8k(row: Mapping, index: int) -> Question:
    """Read a row of GSM8K: question, answer. The id is the index in the file."""
    return Question(index, "math", (text(row, "question"),), text(row, "answer"))


def exact_match(questions: Sequence[Question], texts: Sequence[str]) -> dict[str, float]:
    """Percentage of answers whose final number equals that of the reference."""
    pairs = zip(questions, texts, strict=True)
    numbers = [(final_number(text), final_number(question.reference or "")) for question, text in pairs]
    right = [number is not None and number == expected for number, expected in numbers]
    return {"exact match": 100 * sum(right) / len(right)}


def final_number(text: str) -> Decimal | None:
    """Return the number on the first line that ends in ``#### NUMBER`` or ``### NUMBER``, else the text's last number.

    >>> final_number("He pays $1,200.50 for 3.")
    Decimal('3')
    """
    marked = MARKED.search(text)
    numbers = [marked[1]] if marked else re.findall(NUMBER, text)
    return Decimal(re.sub(r"[$,]", "", numbers[-1])) if numbers else None


def read_boxed(row: Mapping, index: int) -> Question:
    """Read a row with a problem (or a prompt that may end with the instruction), an answer and perhaps a subject.

    The id is the index in the file.
    """
    problem = text(row, "problem", "prompt").removesuffix(BOX_INSTRUCTION)
    answer = row["answer"]
    if isinstance(answer, bool) or not isinstance(answer, (str, int)):
        raise ValueError("answer is neither a text nor an integer")
    return Question(index, str(row.get("subject") or "math"), (problem,), str(answer))


def boxed_match(questions: Sequence[Question], texts: Sequence[str]) -> dict[str, float]:
    """Percentage of answers whose final formula equals the reference, as math-verify judges.

    Formulas that take it longer than `JUDGEMENT_SECONDS` are left out; ``not judged`` is the percentage of them.
    """
    pairs = zip(questions, texts, strict=True)
    judgements = [is_right_formula(question.reference or "", text) for question, text in pairs]
    judged = [is_right for is_right in judgements if is_right is not None]
    scores = {"exact match": 100 * sum(judged) / len(judged)} if judged else {}
    if num_missing := len(judgements) - len(judged):
        scores["not judged"] = 100 * num_missing / len(judgements)
    return scores


@cache
def is_right_formula(reference: str, text: str) -> bool | None:
    """Whether the final formula of a text equals the reference; None if that takes longer than `JUDGEMENT_SECONDS`.

    Equal texts, as lossless drafters write them, are judged once. The timeouts of math-verify are not used: they count
    wall time, so a busy machine would make right answers wrong, and they work only in the main thread.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no timeouts
    try:
        with computing_limit(JUDGEMENT_SECONDS, _Expired()):
            expected = parse(f"\\boxed{{{reference}}}", parsing_timeout=None)
            return bool(verify(expected, parse(text, parsing_timeout=None), timeout_seconds=None))
    except _Expired:
        return None


class _Expired(BaseException):
    """Ends a judgement; math-verify catches every Exception."""


def _boxed(source: str, max_new_tokens: int) -> Benchmark:
    styles = {"boxed": Style("{question}" + BOX_INSTRUCTION), "plain": Style()}
    fields = "problem (or prompt), answer"
    return Benchmark(source, fields, read_boxed, max_new_tokens, styles, boxed_match, package="math_verify")


BENCHMARKS = {
    "math500": _boxed("hub:HuggingFaceH4/MATH-500@6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be:test", 1024),
    "aime24": _boxed("hub:HuggingFaceH4/aime_2024@2fe88a2f1091d5048c0f36abc874fb997b3dd99a", 2048),
    "aime25": _boxed("hub:math-ai/aime25@563bb8404243c5f09de6ec262f2db674fe5bce9b:test", 2048),
    "aime26": _boxed("hub:MathArena/aime_2026@d2de22f3c656b4f56cf8981212186377d1e23bc3", 2048),
    "gsm8k": Benchmark(
        "hub:openai/gsm8k@740312add88f781978c0658806c59bc2815b9866:main:test",
        "question, answer",
        read_gsm8k,
        max_new_tokens=256,
        download="test.jsonl of openai/grade-school-math",
        styles={
            "plain": Style(),
            "ctc": Style(CTC_INSTRUCTION + "{question}", max_new_tokens=512),  # as its authors' baseline
            # The form that Ouroboros uses.
            "shots": Style(
                "Q: {question}\nA:", "Q: {question}\nA: {answer}\n\n", num_shots=8, is_raw=True, stops=("\nQ:",)
            ),
        },
        score=exact_match,
        shots="hub:openai/gsm8k@740312add88f781978c0658806c59bc2815b9866:main:train",
    ),
}
