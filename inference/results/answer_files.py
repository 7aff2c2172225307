"""Reads answer files in FastChat's form: those of EAGLE, Spec-Bench, the original CTC-drafter and `drafters eval`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from data.files import read_json_lines

# The keys of a choice that hold the fields of `RecordedTurn`, in their order.
COLUMNS = ("turns", "new_tokens", "idxs", "wall_time", "token_ids", "ended", "prompt_tokens")


@dataclass(frozen=True)
class RecordedTurn:
    """One answered turn of an answer file; what the file does not contain is None.

    Args:
        text: The answer.
        new_tokens: Number of tokens of the answer; some public baselines record 0.
        index: Zero-based index of the last step.
        seconds: Wall time.
        token_ids: Tokens of the answer, which only `drafters eval` records.
        ended: Whether the turn ended with an end-of-sequence token.
        prompt_tokens: Number of tokens of the prompt.
    """

    text: str
    new_tokens: int | None
    index: int | None
    seconds: float | None
    token_ids: list[int] | None
    ended: bool | None
    prompt_tokens: int | None

    @cached_property
    def num_tokens(self) -> int:
        """Number of tokens; if 0 are recorded, ``index`` + 1, as a base alone writes one token per step."""
        if self.token_ids is not None:
            return len(self.token_ids)
        if self.new_tokens:
            return self.new_tokens
        if self.index is None:
            raise TypeError("neither new_tokens nor idxs is recorded")
        return self.index + 1

    @property
    def is_estimated(self) -> bool:
        """Whether `num_tokens` is ``index`` + 1, because no number of tokens is recorded."""
        return self.token_ids is None and not self.new_tokens


@dataclass(frozen=True)
class RecordedAnswer:
    """One line of an answer file.

    Args:
        place: The file and the line number, for error messages.
        question_id: Number of the question.
        category: Category of the question; None in FastChat's own files.
        model: Name of the model or drafter.
        turns: The answered turns.
        accept_lengths: Number of tokens that each step emitted, prefills excluded, over all turns; None unless
            Spec-Bench or `drafters eval` wrote the file.
    """

    place: str
    question_id: int
    category: str | None
    model: str
    turns: list[RecordedTurn]
    accept_lengths: list[int] | None


def read(path: str | Path) -> list[RecordedAnswer]:
    """Read a file of answers, one question per line.

    Raises:
        ValueError: The file does not exist or is empty, a line is not an answer, or a question is answered twice.
    """
    answers: dict[int, RecordedAnswer] = {}
    for place, row in lines(path):
        answer = parse(place, row)
        if (first := answers.setdefault(answer.question_id, answer)) is not answer:
            raise ValueError(
                f"{place}: question {answer.question_id} was already answered in {first.place}: keep only one of them"
            )
    if not answers:
        raise ValueError(f"{path} holds no answer: give a JSONL file of recorded answers")
    return list(answers.values())


def lines(path: str | Path) -> Iterator[tuple[str, dict]]:
    """Yield the place and the JSON value of each line that is not empty.

    Raises:
        ValueError: The file does not exist, or it is not JSONL.
    """
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder; give a JSONL file of recorded answers in it")
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file; give a JSONL file of recorded answers")
    yield from read_json_lines(path)


def parse(place: str, row: dict) -> RecordedAnswer:
    """Read the answer in one line.

    Args:
        place: The file and the line number, for error messages.
        row: The JSON value of the line.

    Raises:
        ValueError: It is not an answer.
    """
    try:
        choice = row["choices"][0]
        missing = [None] * len(choice["turns"])
        columns = dict.fromkeys(COLUMNS, missing) | choice
        if "decoding_steps" in choice and "idxs" not in choice:  # Spec-Bench's later files count the steps
            columns["idxs"] = [steps - 1 for steps in choice["decoding_steps"]]
        elif "token_ids" not in choice:
            columns["idxs"], columns["new_tokens"] = choice["idxs"], choice["new_tokens"]
        turns = [RecordedTurn(*fields) for fields in zip(*(columns[column] for column in COLUMNS), strict=True)]
        accept_lengths = choice.get("accept_lengths")
        counts = [count or 0 for turn in turns for count in (turn.num_tokens, turn.index, turn.seconds)]
        if min([*counts, *(accept_lengths or [])], default=0) < 0:
            raise ValueError("a count is negative")
        category, model = row.get("category"), row.get("model_id", "")
        return RecordedAnswer(place, row["question_id"], category, model, turns, accept_lengths)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(f"{place}: not a recorded answer ({type(error).__name__}: {error})") from error
