"""Answers with the cost of every step: how they are decoded, and how they are kept as JSON lines.

The lines have the form of FastChat, which Spec-Bench's tools read too.
"""

import json
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from data.benchmarks import Question
from data.conversations import Message, user_message
from data.files import read_json_lines, reading, validated, write_text
from data.templates import decode_answer
from inference.evaluate.intervals import Count, Figure
from inference.prompts import encode_question
from inference.verifier.base import Base
from inference.verifier.session import PHASES, Session, Step

Messages = list[Message]
Slot = tuple[int, str]  # the index of a question, and the name of a drafter
COUNTS = ("emitted", "accepted", "fed_pending", "fed_candidates", "fed_scratch", "draft_forwards")
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Turn:
    """One answered turn of a conversation. One that a server wrote has no steps, but arrivals."""

    text: str
    token_ids: list[Count]  # with the end-of-sequence token
    prompt_tokens: Count  # with the earlier turns
    steps: list[Step]  # the first one is the prefill
    seconds: Figure  # wall time
    cpu_seconds: list[Figure] = field(default_factory=list)  # of the decoding thread for each step; none on a GPU
    # Seconds from the request to each event, and the number of tokens that came with it (0 if the server does not say).
    arrivals: list[tuple[Figure, Count]] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    """A question answered with one drafter."""

    question_id: int
    category: str
    drafter: str
    turns: list[Turn]
    ended: list[bool]  # whether each turn ended with an end-of-sequence token, rather than at the length cap
    peak_bytes: Count | None = None  # peak of allocated GPU memory, with the base and all drafters of the run

    @property
    def seconds(self) -> float:
        """Wall time of all turns."""
        return sum(turn.seconds for turn in self.turns)


# ---- decoding


def answer_question(
    session: Session, name: str, question: Question, base: Base, template: str, max_new_tokens: int
) -> Answer:
    """Decode all turns of a question with the drafter of a session, see `answer_turns`."""
    on_gpu = base.model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(base.model.device)

    def write(messages: Messages, prompt: list[int]) -> tuple[Turn, bool]:
        tokens, steps = list[int](), list[Step]()
        started, marks = time.perf_counter(), [time.thread_time()]
        for emitted, cost in session.decode(prompt, max_new_tokens, base.eos):
            marks.append(time.thread_time())
            tokens += emitted
            steps.append(cost)
        seconds, text = time.perf_counter() - started, decode_answer(tokens, base.tokenizer).strip()
        # A thread that waits for a GPU is not slowed down by other work.
        cpu_seconds = [] if on_gpu else [after - before for before, after in pairwise(marks)]
        return Turn(text, tokens, len(prompt), steps, seconds, cpu_seconds), bool(tokens) and tokens[-1] in base.eos

    encode = partial(encode_question, base, question, template=template)
    turns, ended = answer_turns(question, encode, base.context_length, write)
    peak = torch.cuda.max_memory_allocated(base.model.device) if on_gpu else None
    return Answer(question.question_id, question.category, name, turns, ended, peak)


def answer_turns(
    question: Question,
    encode: Callable[[Messages], list[int]],
    context_length: int,
    write: Callable[[Messages, list[int]], tuple[Turn, bool]],
) -> tuple[list[Turn], list[bool]]:
    """Answer all turns of a question; ``write`` writes a turn after a prompt, and tells whether it ended by itself.

    Each prompt contains the earlier answers. A later turn that no longer fits into the context ends the answer early.
    """
    messages: Messages = []
    turns: list[Turn] = []
    ended: list[bool] = []
    for text in question.turns:
        messages.append(user_message(text))
        prompt = encode(messages)
        if len(prompt) >= context_length and turns:
            break
        turn, is_ended = write(messages, prompt)
        turns.append(turn)
        ended.append(is_ended)
        messages.append({"role": "assistant", "content": turn.text})
    return turns, ended


def decoding_order(names: Sequence[str], indices: Iterable[int], repeat: int = 0) -> list[Slot]:
    """All drafters on the first question, then on the second, and so on; each time another drafter comes first."""
    firsts = [(index, (place + repeat) % len(names)) for place, index in enumerate(indices)]
    return [(index, name) for index, first in firsts for name in [*names[first:], *names[:first]]]


def answer_questions(
    base: Base,
    sessions: dict[str, Session],
    questions: Mapping[int, Question],
    template: str,
    max_new_tokens: int,
    done: Mapping[Slot, Answer] | None = None,
    repeat: int = 0,
    unfinished: Iterable[str] = (),
    resets: bool = True,
) -> Iterator[tuple[Slot, Answer]]:
    """Answer every question with every drafter, in `decoding_order`, and yield the answers that are new.

    Each drafter is warmed up on the first question and then reset. A drafter that remembers earlier texts decodes the
    answers that are done once more, because what it drafts for the others depends on them. Sessions are given by the
    names of their drafters, questions by their indices, ``done`` are the answers of an interrupted run, and all
    questions were decoded ``repeat`` times before.

    Drafters that keep their memory over several benchmarks are warmed up and reset (``resets``) before the first only.
    Those that are ``unfinished`` in any of the benchmarks decode what is done in all of them once more.
    """
    done = done or {}
    slots = decoding_order(list(sessions), questions, repeat)
    unfinished = dict.fromkeys([*(name for index, name in slots if (index, name) not in done), *unfinished])
    for name in unfinished if resets else ():
        first = next(iter(questions.values()))
        answer_question(sessions[name], name, first, base, template, min(WARM_UP_TOKENS, max_new_tokens))
        sessions[name].drafter.reset()
    for index, name in slots:
        before, remembers = done.get((index, name)), sessions[name].drafter.remembers
        if before and not (name in unfinished and remembers):
            continue
        answer = answer_question(sessions[name], name, questions[index], base, template, max_new_tokens)
        if not before:
            yield (index, name), answer
        elif comparable(answer) != comparable(before):
            warnings.warn(
                f"{name} decodes question {answer.question_id} differently than before the interruption: decoding is "
                "not deterministic on this device, so the results may differ from those of an uninterrupted run",
                stacklevel=2,
            )


def comparable(answer: Answer) -> list[Any]:
    """Tokens and step counts of an answer, which are equal for two decodings unless the device is nondeterministic."""
    tokens = [turn.token_ids for turn in answer.turns]
    steps = [[(step.emitted, step.accepted, step.fed, step.draft_forwards) for step in t.steps] for t in answer.turns]
    return [tokens, steps]


def median_answers(repeats: Sequence[Sequence[Answer]]) -> list[Answer]:
    """The answer of median time to each question, or the faster one of two; all repeats have the same order."""
    return [sorted(own, key=lambda answer: answer.seconds)[(len(own) - 1) // 2] for own in zip(*repeats, strict=True)]


# ---- JSON lines


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
        "steps": [
            [[*(getattr(step, name) for name in COUNTS), *(round(s, 7) for s in step.seconds)] for step in turn.steps]
            for turn in turns
        ],
        "step_cpu_times": [[round(seconds, 7) for seconds in turn.cpu_seconds] for turn in turns],
        "arrivals": [[(round(seconds, 7), count) for seconds, count in turn.arrivals] for turn in turns],
        "peak_bytes": answer.peak_bytes,
    }
    return {
        "question_id": answer.question_id,
        "answer_id": f"{answer.drafter}-{answer.question_id}",
        "model_id": answer.drafter,
        "category": answer.category,
        "choices": [choice],
        "tstamp": time.time(),
    }


def from_json(record: dict[str, Any]) -> Answer:
    """The inverse of `to_json`; raises one of `data.files.MALFORMED` if the record is not such an answer."""
    choice = record["choices"][0]
    names = ("turns", "token_ids", "prompt_tokens", "steps", "wall_time", "step_cpu_times", "arrivals")
    fields = ("text", "token_ids", "prompt_tokens", "steps", "seconds", "cpu_seconds", "arrivals")
    turns = [dict(zip(fields, own, strict=True)) for own in zip(*(choice[name] for name in names), strict=True)]
    for turn in turns:
        turn["steps"] = list(map(_step_from_json, turn["steps"]))
        if turn["cpu_seconds"] and len(turn["cpu_seconds"]) != len(turn["steps"]):
            raise ValueError("its steps and their CPU times differ in number")
    if len(choice["ended"]) != len(turns):
        raise ValueError("its turns and its ends differ in number")
    measured = {name: choice[name] for name in ("ended", "peak_bytes")}
    named = {"question_id": record["question_id"], "category": record["category"], "drafter": record["model_id"]}
    return validated(Answer, {**named, "turns": turns, **measured})


def write(path: str | Path, answers: Iterable[Answer]) -> None:
    """Write the answers, one per line, replacing the file."""
    write_text(path, "".join(json.dumps(to_json(answer), ensure_ascii=False) + "\n" for answer in answers))


def read(path: str | Path) -> list[Answer]:
    """Read the answers that `write` wrote; raises ValueError if a line is not such an answer."""
    answers, remedy = [], "delete the line, or run `drafters eval` again"
    for place, record in read_json_lines(path, remedy):
        with reading(place, remedy):
            answers.append(from_json(record))
    return answers


def _step_from_json(row: list[float]) -> dict[str, Any]:
    if len(row) != len(COUNTS) + len(PHASES) or min(row) < 0:
        raise ValueError(f"a step has {len(COUNTS)} counts and {len(PHASES)} times, none of them negative")
    return {**dict(zip(COUNTS, row, strict=False)), "seconds": row[len(COUNTS) :]}
