"""The types of a benchmark: questions, the prompt styles that ask them, and where its rows and its score come from."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

Run = Callable[[str], bool]  # runs a program, isolated from this machine, and tells whether it finished
Score = Callable[..., dict[str, float]]  # of questions and as many texts, and of a `Run` if the benchmark `runs_code`


@dataclass(frozen=True)
class Checks:
    """How to judge a program that answers a question: the tests run after it, in the same module.

    Args:
        prefix: Code that the answer continues. Empty if the answer is the whole program.
        entry_point: The function that the tests call. Empty if only the tests name it.
        tests: Python code that raises an exception if the program is wrong.
    """

    prefix: str
    entry_point: str
    tests: str


@dataclass(frozen=True)
class Question:
    """A question of one or more turns.

    Args:
        question_id: Number of the question in its benchmark.
        category: Category of the question in its benchmark.
        turns: The user's messages.
        reference: A correct answer, if the benchmark has one.
        checks: Tests that a program must pass, for questions about code.
        is_raw: Whether the only turn is a complete prompt that must not be rendered with a chat template.
        stops: Texts that end the answer when it is judged. Decoding does not stop at them, only at the end of sequence
            or the length limit.
        system: System prompt; empty for none.
        tools: Definitions of the tools that the chat template offers, each a JSON object.
    """

    question_id: int
    category: str
    turns: tuple[str, ...]
    reference: str | None = None
    checks: Checks | None = None
    is_raw: bool = False
    stops: tuple[str, ...] = ()
    system: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The fields, without ``system`` and ``tools`` if they are empty."""
        return {name: value for name, value in asdict(self).items() if value or name not in ("system", "tools")}


@dataclass(frozen=True)
class Style:
    """A prompt style: one way to ask the questions of a benchmark.

    Args:
        prompt: The prompt, with {question} for the plain text of the question, {code} for the same without white space
            at its end, {answer} for its reference and {tests} for its tests.
        shot: The text of an example question, in the same form. Examples come before the prompt.
        num_shots: Number of example questions.
        is_raw: See `Question`.
        stops: See `Question`.
    """

    prompt: str = "{question}"
    shot: str = ""
    num_shots: int = 0
    is_raw: bool = False
    stops: tuple[str, ...] = ()

    def put(self, question: Question, shots: Sequence[Question]) -> Question:
        """Return the question as this style asks it. Turns after the first do not change."""
        prompt = "".join(fill(self.shot, shot) for shot in shots) + fill(self.prompt, question)
        return replace(question, turns=(prompt, *question.turns[1:]), is_raw=self.is_raw, stops=self.stops)


def fill(template: str, question: Question) -> str:
    """Fill in the template of a `Style`."""
    values = {"question": question.turns[0], "code": question.turns[0].rstrip(), "answer": question.reference or ""}
    values["tests"] = question.checks.tests if question.checks else ""
    return re.sub(r"\{(question|code|answer|tests)\}", lambda match: values[match[1]], template)


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: its rows, how they are read and asked, and how the answers are scored.

    Args:
        source: Its rows, as `data.sources.read_rows` names them; None if it has no copy on the hub.
        download: The file to download if the hub cannot be used, for error messages.
        fields: The fields of a row, for error messages.
        read: Builds a question from a row and its index in the file. The first turn is the question's plain text.
        max_new_tokens: Largest number of tokens per answer in the papers.
        styles: Prompt styles by name. The first is the default.
        score: Scores answers to questions that have a reference, in percent. None for a benchmark without references.
        runs_code: Whether ``score`` runs the programs in the answers.
        package: The optional package that ``score`` needs.
        shots: The rows of the example questions, as ``source``.
        ids: Ids of the questions to ask, if the file holds others too.
        shot_ids: Ids of the example questions, if they are in the same file.
        parallel: Names of the fields that can also be read from one text file each, with a line per row.
    """

    source: str | None
    download: str
    fields: str
    read: Callable[[Mapping, int], Question]
    max_new_tokens: int
    styles: Mapping[str, Style] = field(default_factory=lambda: {"plain": Style()})
    score: Score | None = None
    runs_code: bool = False
    package: str = ""
    shots: str | None = None
    ids: range | None = None
    shot_ids: range | None = None
    parallel: tuple[str, ...] = ()


def text(row: Mapping, *names: str) -> str:
    """Return the text of the first of the named fields that the row has.

    Raises:
        KeyError: The row has none of the fields.
        ValueError: The field does not hold a text.
    """
    name = next((name for name in names if name in row), names[0])
    if not isinstance(row[name], str):
        raise ValueError(f"{name} is not a text")
    return row[name]
