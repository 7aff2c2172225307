"""Decodes questions with several drafters in turn, so that all drafters meet the same machine."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from data.benchmarks import Question
from data.reasoning import decode_answer
from inference.budget import Budgeted
from inference.prompts import encode_question
from inference.results.records import Answer, Turn
from inference.timing import MIN_CORE_SHARE, CoreClock
from inference.verifier.base import Base
from inference.verifier.session import Generation, Session

Slot = tuple[int, str]  # the index of a question, and the name of a drafter
WARM_UP_TOKENS = 16
MAX_DECODINGS = 3  # of a question by a drafter that waits for a core each time


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
    clock, process_time = CoreClock(), time.process_time()
    for text in question.turns:
        messages.append(("user", text))
        prompt = encode_question(base, question, messages, template)
        if len(prompt) >= base.context_length and turns:
            break
        result, cpu_seconds = decode(session, prompt, max_new_tokens, base.eos)
        ended.append(bool(result.tokens) and result.tokens[-1] in base.eos)
        answer = decode_answer(result.tokens, base.tokenizer).strip()
        cpu_seconds = [] if on_gpu else cpu_seconds  # a thread that waits for a GPU is not slowed down by other work
        turns.append(Turn(answer, result.tokens, len(prompt), result.steps, result.seconds, cpu_seconds))
        messages.append(("assistant", answer))
    peak = torch.cuda.max_memory_allocated(base.model.device) if on_gpu else None
    share, process_time = clock.share(), time.process_time() - process_time
    return Answer(question.question_id, question.category, name, turns, ended, peak, share, process_time)


def decode(
    session: Session, prompt: Sequence[int], max_new_tokens: int, eos: frozenset[int]
) -> tuple[Generation, list[float]]:
    """Decode as `Session.run` does, and return also the CPU time of this thread up to the end of each step."""
    result, cpu_seconds = Generation(), []
    started, mark = time.perf_counter(), time.thread_time()
    for emitted, cost in session.decode(prompt, max_new_tokens, eos):
        now = time.thread_time()
        cpu_seconds.append(now - mark)
        mark = now
        result.tokens += emitted
        result.steps.append(cost)
    result.seconds = time.perf_counter() - started
    return result, cpu_seconds


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
    answers that are done once more, as they decide what it drafts for the answers that are missing. Other drafters
    decode a question again if the thread waited for a core, at most `MAX_DECODINGS` times and, over all slots, half as
    often as there are slots.

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
    num_spare = len(slots) // 2
    for index, name in slots:
        before = done.get((index, name))
        remembers = sessions[name].drafter.remembers
        if before and not (name in unfinished and remembers):
            continue
        arguments = sessions[name], name, questions[index], base, template, max_new_tokens
        answer = answer_question(*arguments)
        may_repeat = base.model.device.type != "cuda" and not remembers
        limit = 1 + min(MAX_DECODINGS - 1, num_spare) if may_repeat else 1
        answer = least_disturbed(answer, partial(answer_question, *arguments), limit)
        num_spare -= answer.decodings - 1
        with_steps = not isinstance(sessions[name].drafter, Budgeted)
        if not before:
            yield answer
        elif without_times(answer, with_steps) != without_times(before, with_steps):
            warnings.warn(
                f"{name} decodes question {answer.question_id} differently than before the interruption: decoding is "
                "not deterministic on this device, so the results may differ from those of an uninterrupted run",
                stacklevel=2,
            )


def least_disturbed(answer: Answer, decode_again: Callable[[], Answer], limit: int) -> Answer:
    """Decode again while the thread waited for a core; return the answer with the largest share of a core.

    Args:
        answer: The first answer.
        decode_again: Decodes the question once more.
        limit: Maximum number of decodings, the first one included.
    """
    num_decodings = 1
    while (answer.core_share or 0.0) < MIN_CORE_SHARE and num_decodings < limit:
        answer = max(answer, decode_again(), key=lambda each: each.core_share or 0.0)
        num_decodings += 1
    return replace(answer, decodings=num_decodings)


def without_times(answer: Answer, with_steps: bool = True) -> list[Any]:
    """Tokens and step counts of an answer, which are equal for two decodings unless the device is nondeterministic.

    Args:
        answer: The answer.
        with_steps: Whether to return the step counts. With an automatic budget they depend on the clock.
    """
    tokens = [turn.token_ids for turn in answer.turns]
    if not with_steps:
        return [tokens]
    steps = [[(step.emitted, step.accepted, step.fed, step.draft_forwards) for step in t.steps] for t in answer.turns]
    return [tokens, steps]
