"""What a benchmark asks: a question, how it is put to the base, and where the questions come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Checks:
    """How a program that answers a question is judged: the tests run after it, in the same module.

    Args:
        prefix: Code that the answer continues; empty where the answer is the whole program.
        entry_point: The function that the tests call; empty where only they name it.
        tests: Python that raises where the program is wrong.
    """

    prefix: str
    entry_point: str
    tests: str


@dataclass(frozen=True)
class Question:
    """What a user asks, turn by turn.

    Args:
        question_id: Number of the question in its benchmark.
        category: The kind of question.
        turns: What is said to the base.
        reference: An answer that counts as right.
        checks: For code, what the answer must pass.
        is_raw: Whether the one turn is a whole prompt, fed as it stands and not through a chat template.
        stops: Texts that end the answer for who judges it. Decoding goes on to the end of sequence or the length cap.
    """

    question_id: int
    category: str
    turns: tuple[str, ...]
    reference: str | None = None
    checks: Checks | None = None
    is_raw: bool = False
    stops: tuple[str, ...] = ()


@dataclass(frozen=True)
class Style:
    """One way to put a question to the base.

    Args:
        about: The style in one line.
        ask: Makes the prompt from the question's own text (its turn) and from the questions shown as examples.
        num_shots: Examples it shows.
        is_raw: As in `Question`.
        stops: As in `Question`.
    """

    about: str
    ask: Callable[[Question, Sequence[Question]], str]
    num_shots: int = 0
    is_raw: bool = False
    stops: tuple[str, ...] = ()

    def put(self, question: Question, shots: Sequence[Question]) -> Question:
        """Return the question as this style asks it; turns after the first stay as they are."""
        turns = (self.ask(question, shots), *question.turns[1:])
        return replace(question, turns=turns, is_raw=self.is_raw, stops=self.stops)


AS_IT_IS = {"plain": Style("the question's own text alone", lambda question, shots: question.turns[0])}


@dataclass(frozen=True)
class Hub:
    """A data set on the hub: its name, configuration and splits."""

    repository: str
    configuration: str | None
    split: str
    shot_split: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class Benchmark:
    """Where questions come from, how they are read and asked.

    Args:
        hub: Its place on the hub, if it has one.
        download: The file to download where there is no hub.
        fields: What a row holds, for an error.
        read: Makes the question from a row and its place in the file; the turn is the question's own text.
        max_new_tokens: Tokens of an answer at most, as the papers set it.
        styles: By name; the first is the default.
        ids: The questions to ask, of a file that holds others too.
        shot_ids: The questions shown as examples, where the same file holds them.
        parallel: Fields that come as one text file each, a line for each row.
    """

    hub: Hub | None
    download: str
    fields: str
    read: Callable[[Mapping, int], Question]
    max_new_tokens: int
    styles: Mapping[str, Style] = field(default_factory=lambda: AS_IT_IS)
    ids: range | None = None
    shot_ids: range | None = None
    parallel: tuple[str, ...] = ()


def text(row: Mapping, *names: str) -> str:
    """Return the first of the named fields that the row has.

    Raises:
        KeyError: It has none of them.
        ValueError: The field is no text.
    """
    name = next((name for name in names if name in row), names[0])
    if not isinstance(row[name], str):
        raise ValueError(f"{name} is not a text")
    return row[name]
