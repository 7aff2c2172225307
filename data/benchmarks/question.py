"""The types of a benchmark: questions, the prompt styles that ask them, and where its rows and its score come from."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from data.sources import HUB

ProgramRunner = Callable[[str], bool]  # runs a program, isolated from this machine, and tells whether it finished
Score = Callable[..., dict[str, float]]  # of questions and as many texts, and of a `ProgramRunner` if it `runs_code`


@dataclass(frozen=True)
class Checks:
    """How to judge a program that answers a question: the tests run after it, in the same module."""

    prefix: str  # code that the answer continues; empty if the answer is the whole program
    entry_point: str  # the function that the tests call; empty if only the tests name it
    tests: str  # code that raises an exception if the program is wrong


@dataclass(frozen=True)
class Question:
    """A question of one or more turns.

    Decoding does not stop at ``stops``, only at the end of sequence or the length limit.
    """

    question_id: int
    category: str
    turns: tuple[str, ...]  # the user's messages
    reference: str | None = None  # a correct answer, if the benchmark has one
    checks: Checks | None = None  # for questions about code
    is_raw: bool = False  # whether the only turn is a complete prompt, not to be rendered with a chat template
    stops: tuple[str, ...] = ()  # texts that end the answer when it is judged
    system: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()  # definitions of the tools that the chat template offers

    def as_dict(self) -> dict[str, Any]:
        """The fields, without ``system`` and ``tools`` if they are empty."""
        return {name: value for name, value in asdict(self).items() if value or name not in ("system", "tools")}


@dataclass(frozen=True)
class Style:
    """A prompt style: one way to ask the questions of a benchmark.

    A prompt has {question} for the plain text of the question, {code} for the same without white space at its end,
    {answer} for its reference and {tests} for its tests. Example questions come before it, in the form of ``shot``.
    """

    prompt: str = "{question}"
    shot: str = ""
    num_shots: int = 0
    is_raw: bool = False  # see `Question`, as for `stops`
    stops: tuple[str, ...] = ()
    max_new_tokens: int | None = None  # per answer; None for the benchmark's own

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
    """A benchmark: its rows, how they are read and asked, and how the answers are scored."""

    source: str | None  # its rows, as `data.sources.read_rows` names them; None if it has no copy on the hub
    fields: str  # of a row, for error messages
    read: Callable[[Mapping, int], Question]  # from a row and its index; the first turn is the question's plain text
    # Per answer, where a style has none: HumanEval, MBPP, GSM8K, CNN/DM and WMT16 as in section 4.1 of the Ouroboros
    # paper, MT-Bench as in the answers released with CTC-drafter, Spec-Bench as in its own evaluation, XSum as CNN/DM.
    # The others are our choice.
    max_new_tokens: int
    styles: Mapping[str, Style] = field(default_factory=lambda: {"plain": Style()})  # the first is the default
    score: Score | None = None  # of answers to questions that have a reference, in percent
    runs_code: bool = False  # whether `score` runs the programs in the answers
    package: str = ""  # the optional package that `score` needs
    shots: str | None = None  # the rows of the example questions, as `source`
    ids: range | None = None  # of the questions to ask, if the file holds others too
    shot_ids: range | None = None  # of the example questions, if they are in the same file
    download: str = ""  # the file to download if the hub cannot be used, unless it is one of `source`

    @property
    def where_to_download(self) -> str:
        """The file to download if the hub cannot be used; empty if there is none."""
        match = HUB.fullmatch(self.source or "")
        if self.download or match is None:
            return self.download
        part = match["file"] or f"the {match['split'] or 'train'} split"
        return f"{part} of {match['name']}"


def text(row: Mapping, *names: str) -> str:
    """Return the text of the first of the named fields that the row has, or raise KeyError or ValueError."""
    name = next((name for name in names if name in row), names[0])
    if not isinstance(row[name], str):
        raise ValueError(f"{name} is not a text")
    return row[name]
