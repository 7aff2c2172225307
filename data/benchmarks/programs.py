"""HumanEval and MBPP, both also with EvalPlus's tests, and LiveCodeBench: programs to write."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from textwrap import dedent

from data.benchmarks.question import Benchmark, Checks, ProgramRunner, Question, Style, fill, text

# The stop sequences that Codex uses for HumanEval (Chen et al. 2021).
FUNCTION_ENDS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(")
OUROBOROS = (
    "Please complete the following Python code without providing any additional tasks such as testing or explanations\n"
)
MBPP = "hub:google-research-datasets/mbpp@4bb6404fdc6cacfda99d4ac4205087b89d32030c:full"
# In our own wording.
COMPLETE = "Complete this Python function. Write the whole function.\n\n```python\n{code}\n```"
WRITE = "{question}\n\nWrite it in Python. It must pass these tests:\n\n```python\n{tests}\n```"
# The prompt of the MBPP paper (Austin et al. 2021).
TASK = (
    "You are an expert Python programmer, and here is your task: {question} "
    "Your code should pass these tests:\n\n{tests}\n[BEGIN]\n"
)
FENCED = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)


def read_humaneval(row: Mapping, index: int) -> Question:
    """Read a row of HumanEval: task_id, prompt, entry_point, canonical_solution, test."""
    prompt, entry_point = text(row, "prompt"), text(row, "entry_point")
    checks = Checks(prompt, entry_point, f"{text(row, 'test')}\ncheck({entry_point})\n")
    number = int(text(row, "task_id").removeprefix("HumanEval/"))
    return Question(number, "coding", (prompt,), text(row, "canonical_solution"), checks)


def read_mbpp(row: Mapping, index: int) -> Question:
    """Read a row of MBPP: task_id, text (prompt in the sanitized form), code, test_list, optional test_setup_code."""
    tests = row["test_list"]
    if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        raise ValueError("test_list is not a list of texts")
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or [])
    checked = "\n".join(part for part in (setup, *tests) if part).replace("\r\n", "\n")
    code = text(row, "code").replace("\r\n", "\n")
    return Question(int(row["task_id"]), "coding", (text(row, "text", "prompt"),), code, Checks("", "", checked))


def read_mbpp_plus(row: Mapping, index: int) -> Question:
    """Read a row of MBPP+: a row of the sanitized MBPP, whose tests are shown, with EvalPlus's own ones in ``test``."""
    question = read_mbpp(row, index)
    return replace(question, turns=(fill(WRITE, question),), checks=Checks("", "", text(row, "test")))


def read_livecodebench(row: Mapping, index: int) -> Question:
    """Read a row of LiveCodeBench: question_content, perhaps starter_code. Its tests are not run."""
    starter = row.get("starter_code") or ""
    problem = text(row, "question_content")
    form = f"Continue this code:\n\n```python\n{starter.rstrip()}\n```" if starter else "Read stdin, write to stdout."
    category = str(row.get("difficulty") or "coding")
    return Question(index, category, (f"{problem}\n\nSolve the problem in Python. {form}",))


def pass_at_1(questions: Sequence[Question], texts: Sequence[str], run: ProgramRunner) -> dict[str, float]:
    """Percentage of programs that pass their tests, one program per task (Chen et al. 2021 with n = k = 1)."""
    passed = [run(program(question, text)) for question, text in zip(questions, texts, strict=True)]
    return {"pass@1": 100 * sum(passed) / len(passed)}


def program(question: Question, text: str) -> str:
    """Return the program of an answer: the prefix that it continues, its code, and the tests.

    If the answer has fenced code blocks, its code is the first block that defines the required function, or else the
    first block. A fence in an answer that continues code ends it.
    """
    assert question.checks is not None, f"question {question.question_id} has no tests"
    prefix, entry_point = question.checks.prefix, question.checks.entry_point
    if question.is_raw and not text.lstrip().startswith("```"):
        text = text.partition("```")[0]
    blocks = FENCED.findall(text)
    defines = re.compile(rf"^(?:async )?def {re.escape(entry_point)}\b" if entry_point else r"^def ", re.MULTILINE)
    flush = [form for block in blocks for form in (block, dedent(block))]  # a fence may be a part of a list
    code = next((block for block in flush if defines.search(block)), blocks[0] if blocks else text)
    if prefix and not defines.search(code):
        # Decoding or stripping may have removed the indentation of the first line.
        last = prefix.rstrip("\n").rpartition("\n")[2]
        indentation = last[: len(last) - len(last.lstrip())]
        code = code if code.startswith((indentation, "\n")) else indentation + code.lstrip(" ")
    # The prefix stays even if the code defines the function, because it may contain imports and other functions.
    return f"{prefix}{code}\n\n{question.checks.tests}\n"


def _humaneval(source: str, download: str = "") -> Benchmark:
    return Benchmark(
        source,
        "task_id, prompt, entry_point, canonical_solution, test",
        read_humaneval,
        max_new_tokens=512,
        styles={
            "instruct": Style(COMPLETE),
            "completion": Style(is_raw=True, stops=FUNCTION_ENDS),  # the start of the function (ANPD, appendix A.5)
            "ouroboros": Style(OUROBOROS + "{question}", is_raw=True, stops=FUNCTION_ENDS),
        },
        score=pass_at_1,
        runs_code=True,
        download=download,
    )


def _mbpp(split: str, ids: range) -> Benchmark:
    return Benchmark(
        f"{MBPP}:{split}",
        "task_id, text, code, test_list",
        read_mbpp,
        max_new_tokens=512,
        download="mbpp.jsonl of google-research/mbpp",
        styles={
            "instruct": Style(WRITE),
            "shots": Style(TASK, TASK + "{answer}\n[DONE]\n", num_shots=3, is_raw=True, stops=("[DONE]",)),
        },
        score=pass_at_1,
        runs_code=True,
        shots=f"{MBPP}:prompt",
        ids=ids,
        shot_ids=range(1, 11),
    )


BENCHMARKS = {
    "humaneval": _humaneval(
        "hub:openai/openai_humaneval@7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544:test",
        "HumanEval.jsonl.gz of openai/human-eval",
    ),
    "humaneval_plus": _humaneval("hub:evalplus/humanevalplus@d32357cf319e50e9c8d8dab5ea876c72b0fd321b:test"),
    "mbpp": _mbpp("test", range(11, 511)),
    "mbpp_validation": _mbpp("validation", range(511, 601)),
    "mbpp_plus": Benchmark(
        "hub:evalplus/mbppplus@b2d74c91837c3f2a20c1299ae98133cbe7cfa077:test",
        "task_id, prompt, code, test_list, test",
        read_mbpp_plus,
        max_new_tokens=512,
        score=pass_at_1,
        runs_code=True,
    ),
    "livecodebench": Benchmark(
        # `datasets` no longer runs the script of this repository. The last file has the problems that release 6 added.
        "hub:livecodebench/code_generation_lite@0fe84c3912ea0c4d4a78037083943e8f0c4dd505/test6.jsonl",
        "question_content, starter_code",
        read_livecodebench,
        max_new_tokens=1024,
    ),
}
