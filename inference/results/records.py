"""Recorded answers with the cost of every step, as JSON lines that FastChat and Spec-Bench can read."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.files import MALFORMED, read_json_lines, validated, write_text
from inference.verifier.session import PHASES, StepCost

COUNTS = ("emitted", "accepted", "fed_pending", "fed_candidates", "fed_scratch", "draft_forwards")


@dataclass(frozen=True)
class Turn:
    """One answered turn of a conversation.

    Args:
        text: The answer.
        token_ids: Tokens of the answer, including the end-of-sequence token.
        prompt_tokens: Number of tokens of the prompt, including the earlier turns.
        steps: The cost of each step; the first one is the prefill.
        seconds: Wall time of the turn.
        cpu_seconds: CPU time of the decoding thread up to the end of each step, from that of the one before or from the
            start of the turn; empty if it was not measured, as on a GPU.
        arrivals: If a server wrote the turn, the seconds from the request to each of its events, and the number of
            tokens that came with it (0 if the server does not say). The turn then has no steps.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    steps: list[StepCost]
    seconds: float
    cpu_seconds: list[float] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    """A question answered with one drafter.

    Args:
        question_id: Number of the question in its benchmark.
        category: Category of the question in its benchmark.
        drafter: Name of the drafter.
        turns: The answered turns.
        ended: Whether each turn ended with an end-of-sequence token, rather than at the length cap.
        peak_bytes: Peak of allocated GPU memory during decoding, including the base and all drafters of the run; None
            on a CPU.
        core_share: Share of the time that the decoding thread spent on a core.
        cpu_seconds: CPU time of all threads of the process during the answer.
        decodings: How often the question was decoded until the decoding thread had a core.
    """

    question_id: int
    category: str
    drafter: str
    turns: list[Turn]
    ended: list[bool]
    peak_bytes: int | None = None
    core_share: float | None = None
    cpu_seconds: float | None = None
    decodings: int = 1

    @property
    def seconds(self) -> float:
        """Wall time of all turns."""
        return sum(turn.seconds for turn in self.turns)


def median_answers(repeats: Sequence[Sequence[Answer]]) -> list[Answer]:
    """The answer of median time to each question, or the faster one of two; all repeats have the same order."""
    return [
        sorted(answers, key=lambda answer: answer.seconds)[(len(answers) - 1) // 2]
        for answers in zip(*repeats, strict=True)
    ]


def to_json(answer: Answer) -> dict[str, Any]:
    """The answer in FastChat's form.

    ``idxs`` is the zero-based index of each turn's last step, as FastChat-style tools expect it, and
    ``accept_lengths`` what Spec-Bench averages: tokens emitted by each step, prefills excluded.
    """
    turns = answer.turns
    choice = {
        "index": 0,
        "turns": [turn.text for turn in turns],
        "token_ids": [list(turn.token_ids) for turn in turns],
        "idxs": [len(turn.steps) - 1 if turn.steps else None for turn in turns],
        "new_tokens": [len(turn.token_ids) for turn in turns],
        "wall_time": [round(turn.seconds, 7) for turn in turns],
        "accept_lengths": [step.emitted for turn in turns for step in turn.steps[1:]],
        "prompt_tokens": [turn.prompt_tokens for turn in turns],
        "ended": list(answer.ended),
        "steps": [[_step_to_json(step) for step in turn.steps] for turn in turns],
        "peak_bytes": answer.peak_bytes,
        "core_share": None if answer.core_share is None else round(answer.core_share, 4),
        "cpu_time": None if answer.cpu_seconds is None else round(answer.cpu_seconds, 7),
        "step_cpu_times": [[round(seconds, 7) for seconds in turn.cpu_seconds] for turn in turns],
        "decodings": answer.decodings,
    }
    if any(turn.arrivals for turn in turns):
        choice["arrivals"] = [[(round(seconds, 7), count) for seconds, count in turn.arrivals] for turn in turns]
    return {
        "question_id": answer.question_id,
        "answer_id": f"{answer.drafter}-{answer.question_id}",
        "model_id": answer.drafter,
        "category": answer.category,
        "choices": [choice],
        "tstamp": time.time(),
    }


def from_json(record: dict[str, Any]) -> Answer:
    """The inverse of `to_json`.

    Raises:
        ValueError: The record is not such an answer.
    """
    try:
        choice = record["choices"][0]
        columns = [choice[key] for key in ("turns", "token_ids", "prompt_tokens", "steps", "wall_time")]
        columns += [choice.get(key, [[]] * len(columns[0])) for key in ("step_cpu_times", "arrivals")]
        turns = [
            {
                "text": text,
                "token_ids": token_ids,
                "prompt_tokens": prompt_tokens,
                "steps": [_step_from_json(row) for row in steps],
                "seconds": seconds,
                "cpu_seconds": cpu_seconds,
                "arrivals": arrivals,
            }
            for text, token_ids, prompt_tokens, steps, seconds, cpu_seconds, arrivals in zip(*columns, strict=True)
        ]
        # Answers of older runs have none of these.
        measured = {name: choice.get(name) for name in ("peak_bytes", "core_share")}
        measured |= {"cpu_seconds": choice.get("cpu_time"), "decodings": choice.get("decodings", 1)}
        fields = {"question_id": record["question_id"], "category": record["category"], "drafter": record["model_id"]}
        answer = validated(Answer, {**fields, "turns": turns, "ended": choice["ended"], **measured})
    except MALFORMED as error:
        raise ValueError(f"not a recorded answer ({type(error).__name__}: {error})") from error
    if len(answer.ended) != len(answer.turns):
        raise ValueError("not a recorded answer (its turns and its ends differ in number)")
    if any(turn.cpu_seconds and len(turn.cpu_seconds) != len(turn.steps) for turn in answer.turns):
        raise ValueError("not a recorded answer (its steps and their CPU times differ in number)")
    return answer


def write(path: str | Path, answers: Iterable[Answer]) -> None:
    """Write the answers, one per line, replacing the file."""
    write_text(path, "".join(map(_line, answers)))


def read(path: str | Path) -> list[Answer]:
    """Read the answers that `write` wrote.

    Raises:
        ValueError: A line is not such an answer.
    """
    answers = []
    try:
        for place, record in read_json_lines(path):
            try:
                answers.append(from_json(record))
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{error}: delete the line, or the file, and run `drafters eval` again") from error
    return answers


def _line(answer: Answer) -> str:
    return json.dumps(to_json(answer), ensure_ascii=False) + "\n"


def _step_to_json(step: StepCost) -> list[float]:
    counts = [getattr(step, name) for name in COUNTS]
    return counts + [round(seconds, 7) for seconds in step.seconds]


def _step_from_json(row: list[float]) -> dict[str, Any]:
    if len(row) != len(COUNTS) + len(PHASES) or min(row) < 0:
        raise ValueError(f"a step has {len(COUNTS)} counts and {len(PHASES)} times, none of them negative")
    return {**dict(zip(COUNTS, row, strict=False)), "seconds": row[len(COUNTS) :]}
