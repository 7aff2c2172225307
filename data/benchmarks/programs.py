"""HumanEval and MBPP: Python functions, judged by running tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from data.benchmarks.question import Benchmark, Checks, Hub, Question, Style, text

# Where a completion of a function ends: Codex's five stops (Chen et al. 2021).
FUNCTION_ENDS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(")
OUROBOROS_INSTRUCTION = (
    "Please complete the following Python code without providing any additional tasks such as testing or explanations\n"
)


def read_humaneval(row: Mapping, index: int) -> Question:
    """Read HumanEval: task_id, prompt, entry_point, canonical_solution, test."""
    prompt, entry_point = text(row, "prompt"), text(row, "entry_point")
    checks = Checks(prompt, entry_point, f"{text(row, 'test')}\ncheck({entry_point})\n")
    number = int(text(row, "task_id").removeprefix("HumanEval/"))
    return Question(number, "coding", (prompt,), text(row, "canonical_solution"), checks)


def read_mbpp(row: Mapping, index: int) -> Question:
    """Read MBPP: task_id, text (prompt in the sanitized form), code, test_list, perhaps test_setup_code."""
    tests = row["test_list"]
    if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        raise ValueError("test_list is not a list of texts")
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or [])
    checked = "\n".join(part for part in (setup, *tests) if part).replace("\r\n", "\n")
    code = text(row, "code").replace("\r\n", "\n")
    return Question(int(row["task_id"]), "coding", (text(row, "text", "prompt"),), code, Checks("", "", checked))


def complete(question: Question, shots: Sequence[Question]) -> str:
    """Ask a chat model to complete the function."""
    return f"Complete this Python function. Write the whole function.\n\n```python\n{question.turns[0].rstrip()}\n```"


def write(question: Question, shots: Sequence[Question]) -> str:
    """Ask a chat model for a function that passes the tests."""
    return f"{question.turns[0]}\n\nWrite it in Python. It must pass these tests:\n\n```python\n{_tests(question)}\n```"


def after_shots(question: Question, shots: Sequence[Question]) -> str:
    """Ask in the form of the MBPP paper (Austin et al. 2021), after examples of its prompt part."""
    return "".join(_task(shot) + f"{shot.reference}\n[DONE]\n" for shot in shots) + _task(question)


def _task(question: Question) -> str:
    return (
        f"You are an expert Python programmer, and here is your task: {question.turns[0]} "
        f"Your code should pass these tests:\n\n{_tests(question)}\n[BEGIN]\n"
    )


def _tests(question: Question) -> str:
    assert question.checks is not None
    return question.checks.tests


def _mbpp(split: str, ids: range) -> Benchmark:
    return Benchmark(
        Hub("google-research-datasets/mbpp", "full", split, "prompt"),
        "mbpp.jsonl of google-research/mbpp",
        "task_id, text, code, test_list",
        read_mbpp,
        max_new_tokens=512,
        styles={
            "instruct": Style("the task and its tests in a chat, in our words", write),
            "shots": Style(
                "the MBPP paper's prompt after three tasks of its prompt part, without a chat template",
                after_shots,
                num_shots=3,
                is_raw=True,
                stops=("[DONE]",),
            ),
        },
        ids=ids,
        shot_ids=range(1, 11),
    )


BENCHMARKS = {
    "humaneval": Benchmark(
        Hub("openai/openai_humaneval", None, "test"),
        "HumanEval.jsonl.gz of openai/human-eval",
        "task_id, prompt, entry_point, canonical_solution, test",
        read_humaneval,
        max_new_tokens=512,
        styles={
            "instruct": Style("the function in a chat, with a request of ours to complete it", complete),
            "completion": Style(
                "the function's beginning alone, without a chat template (ANPD A.5)",
                lambda question, shots: question.turns[0],
                is_raw=True,
                stops=FUNCTION_ENDS,
            ),
            "ouroboros": Style(
                "Ouroboros's instruction line, then the function's beginning, without a chat template",
                lambda question, shots: OUROBOROS_INSTRUCTION + question.turns[0],
                is_raw=True,
                stops=FUNCTION_ENDS,
            ),
        },
    ),
    "mbpp": _mbpp("test", range(11, 511)),
    "mbpp_validation": _mbpp("validation", range(511, 601)),
}
