"""Decodes questions with several drafters in turn, so that all drafters meet the same machine."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from data.benchmarks import Question
from inference.api.prompts import encode_question
from inference.engine.base import Base
from inference.engine.session import Session
from inference.results.records import Answer, Turn
from inference.runs.timing import CoreClock

Slot = tuple[int, str]  # the index of a question, and the name of a drafter
WARM_UP_TOKENS = 16


def answer_question(
    session: Session, name: str, question: Question, base: Base, template: str, max_new_tokens: int
) -> Answer:
    """Decode all turns of a question; each prompt contains the base's own earlier answers.

    A later turn that no longer fits into the base's context ends the answer early.

    Args:
        session: Decodes with one drafter.
        name: The drafter's name.
        question: The question.
        base: The base.
        template: Chat template.
        max_new_tokens: Maximum number of tokens of a turn.
    """
    messages: list[tuple[str, str]] = []
    turns: list[Turn] = []
    ended: list[bool] = []
    on_gpu = base.model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(base.model.device)
    clock = CoreClock()
    for text in question.turns:
        messages.append(("user", text))
        prompt = encode_question(base, question, messages, template)
        if len(prompt) >= base.context_length and turns:
            break
        result = session.run(prompt, max_new_tokens, base.eos)
        ended.append(bool(result.tokens) and result.tokens[-1] in base.eos)
        answer = str(base.tokenizer.decode(result.tokens, skip_special_tokens=True)).strip()
        turns.append(Turn(answer, result.tokens, len(prompt), result.steps, result.seconds))
        messages.append(("assistant", answer))
    peak = torch.cuda.max_memory_allocated(base.model.device) if on_gpu else None
    return Answer(question.question_id, question.category, name, turns, ended, peak, clock.share())


def decoding_order(names: Sequence[str], num_questions: int, repeat: int = 0) -> list[Slot]:
    """All drafters on the first question, then on the second, and so on; each time another drafter comes first.

    Args:
        names: Names of the drafters.
        num_questions: Number of questions.
        repeat: Number of times that all questions were decoded before.
    """
    slots: list[Slot] = []
    for index in range(num_questions):
        first = (index + repeat) % len(names)
        slots += [(index, name) for name in [*names[first:], *names[:first]]]
    return slots


def answer_questions(
    base: Base,
    sessions: dict[str, Session],
    questions: list[Question],
    template: str,
    max_new_tokens: int,
    done: Mapping[Slot, Answer] | None = None,
    repeat: int = 0,
) -> Iterator[Answer]:
    """Answer every question with every drafter, in `decoding_order`, and yield the answers that are new.

    Each drafter is warmed up on the first question and then reset. A drafter that remembers earlier texts decodes the
    answers that are done once more, as they decide what it drafts for the answers that are missing.

    Args:
        base: The base.
        sessions: A session for each drafter, by the drafter's name.
        questions: The questions.
        template: Chat template.
        max_new_tokens: Maximum number of tokens of a turn.
        done: The answers of an interrupted run.
        repeat: Number of times that all questions were decoded before.
    """
    done = done or {}
    slots = decoding_order(list(sessions), len(questions), repeat)
    unfinished = dict.fromkeys(name for index, name in slots if (index, name) not in done)
    for name in unfinished:
        answer_question(sessions[name], name, questions[0], base, template, min(WARM_UP_TOKENS, max_new_tokens))
        sessions[name].drafter.reset()
    for index, name in slots:
        before = done.get((index, name))
        if before and not (name in unfinished and sessions[name].drafter.remembers):
            continue
        answer = answer_question(sessions[name], name, questions[index], base, template, max_new_tokens)
        if not before:
            yield answer
        elif without_times(answer) != without_times(before):
            warnings.warn(
                f"{name} decodes question {answer.question_id} differently than before the interruption: decoding is "
                "not deterministic on this device, so the results may differ from those of an uninterrupted run",
                stacklevel=2,
            )


def without_times(answer: Answer) -> list[Any]:
    """Tokens and step counts of an answer, which are equal for two decodings unless the device is nondeterministic."""
    steps = [[(step.emitted, step.accepted, step.fed, step.draft_forwards) for step in t.steps] for t in answer.turns]
    return [[turn.token_ids for turn in answer.turns], steps]
