"""Answer files of FastChat's form, as EAGLE, Spec-Bench, the original CTC-drafter and `drafters eval` write them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

COLUMNS = ("turns", "new_tokens", "idxs", "wall_time", "token_ids", "ended", "prompt_tokens")  # as `RecordedTurn`


@dataclass(frozen=True)
class RecordedTurn:
    """What a file tells of one answered turn; None where it does not tell.

    Args:
        text: The answer.
        new_tokens: Tokens of the answer; some public baselines record 0.
        index: Zero-based index of the last step.
        seconds: Wall time.
        token_ids: The answer's tokens, which only our own records hold.
        ended: Whether it ended with an end-of-sequence token.
        prompt_tokens: Tokens of the prompt.
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
        """Tokens of the answer. Where 0 are recorded ``index`` + 1: a base alone writes one token a step."""
        return len(self.token_ids) if self.token_ids is not None else self.new_tokens or self.index + 1

    @property
    def has_stand_in(self) -> bool:
        """Whether ``index`` + 1 had to be counted."""
        return self.token_ids is None and not self.new_tokens


@dataclass(frozen=True)
class RecordedAnswer:
    """One line of an answer file.

    Args:
        place: The file and the line, for messages.
        question_id: Number of the question.
        category: Kind of the question; FastChat's own files do not tell.
        model: What answered.
        turns: The answered turns.
        accept_lengths: Tokens each step gained, prefills excluded, all turns in a row; Spec-Bench and we tell them.
    """

    place: str
    question_id: int
    category: str | None
    model: str
    turns: list[RecordedTurn]
    accept_lengths: list[int] | None


def read(path: str | Path) -> list[RecordedAnswer]:
    """Read a file of answers, a question a line.

    Raises:
        ValueError: There is no such file, it holds no answer, a line is none, or a question is answered twice.
    """
    answers: dict[int, RecordedAnswer] = {}
    for place, row in lines(path):
        answer = parse(place, row)
        if (first := answers.setdefault(answer.question_id, answer)) is not answer:
            raise ValueError(f"{place}: question {answer.question_id} is answered already in {first.place}: keep one")
    if not answers:
        raise ValueError(f"{path} holds no answer: give a JSONL file of recorded answers")
    return list(answers.values())


def lines(path: str | Path) -> Iterator[tuple[str, dict]]:
    """The place and the JSON of each line that is not empty.

    Raises:
        ValueError: There is no such file, or it is no JSONL.
    """
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder; give a JSONL file of recorded answers in it")
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file; give a JSONL file of recorded answers")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason}); convert the file") from error
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"{path} line {number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path} line {number}: invalid JSON ({error.msg})") from error


def parse(place: str, row: dict) -> RecordedAnswer:
    """The answer that a line holds.

    Raises:
        ValueError: It holds none.
    """
    try:
        choice = row["choices"][0]
        nothing = [None] * len(choice["turns"])
        told = dict.fromkeys(COLUMNS, nothing) | choice
        if "decoding_steps" in choice and "idxs" not in choice:  # Spec-Bench's later files count the steps
            told["idxs"] = [steps - 1 for steps in choice["decoding_steps"]]
        elif "token_ids" not in choice:
            told["idxs"], told["new_tokens"] = choice["idxs"], choice["new_tokens"]
        turns = [RecordedTurn(*fields) for fields in zip(*(told[column] for column in COLUMNS), strict=True)]
        accept_lengths = choice.get("accept_lengths")
        counts = [count or 0 for turn in turns for count in (turn.num_tokens, turn.index, turn.seconds)]
        if min([*counts, *(accept_lengths or [])], default=0) < 0:
            raise ValueError("a count is negative")
        category, model = row.get("category"), row.get("model_id", "")
        return RecordedAnswer(place, row["question_id"], category, model, turns, accept_lengths)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(f"{place}: not a recorded answer ({type(error).__name__}: {error})") from error
