"""Answers to questions, drafter by drafter in turn, so that all meet the same machine."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import torch

from data.benchmarks import Question
from inference.api.prompts import encode_question
from inference.engine.base import Base
from inference.engine.session import Session
from inference.results.records import Answer, Turn
from inference.runs.timing import CoreClock

Place = tuple[int, str]  # a question's place among those asked, and a drafter
WARM_UP = 16  # tokens


def answer(session: Session, name: str, question: Question, base: Base, template: str, max_new_tokens: int) -> Answer:
    """Decode all turns of a question; the base reads its own earlier answers."""
    messages: list[tuple[str, str]] = []
    turns, ended = [], []
    on_gpu = base.model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(base.model.device)
    clock = CoreClock()
    for text in question.turns:
        messages.append(("user", text))
        prompt = encode_question(base, question, messages, template)
        if len(prompt) >= base.context_length and turns:
            break  # a later turn that no longer fits: `drafters eval` says how many were left out
        result = session.run(prompt, max_new_tokens, base.eos)
        ended.append(bool(result.tokens) and result.tokens[-1] in base.eos)
        written = base.tokenizer.decode(result.tokens, skip_special_tokens=True).strip()
        turns.append(Turn(written, result.tokens, len(prompt), result.steps, result.seconds))
        messages.append(("assistant", written))
    peak = torch.cuda.max_memory_allocated(base.model.device) if on_gpu else None
    return Answer(question.question_id, question.category, name, turns, ended, peak, clock.share())


def order(names: list[str], num_questions: int, repeat: int = 0) -> list[Place]:
    """Question by question all drafters, each time beginning with the next one."""
    places = []
    for place in range(num_questions):
        turn = (place + repeat) % len(names)
        places += [(place, name) for name in names[turn:] + names[:turn]]
    return places


def answers(
    base: Base,
    sessions: dict[str, Session],
    questions: list[Question],
    template: str,
    max_new_tokens: int,
    done: Mapping[Place, Answer] | None = None,
    repeat: int = 0,
) -> Iterator[Answer]:
    """Answer every question with every drafter in `order`.

    Each drafter is warmed up on the first question, and what it remembers across texts begins with the first answer. An
    answer that is done is not given again; only a drafter that remembers decodes it once more, to know what it knew.

    Args:
        base: The base.
        sessions: By drafter.
        questions: What is asked.
        template: Chat template.
        max_new_tokens: Tokens of a turn at most.
        done: What was answered before.
        repeat: How often all this was done before.
    """
    done = done or {}
    places = order(list(sessions), len(questions), repeat)
    unfinished = dict.fromkeys(name for place, name in places if (place, name) not in done)
    for name in unfinished:
        answer(sessions[name], name, questions[0], base, template, min(WARM_UP, max_new_tokens))
        sessions[name].drafter.reset()
    for place, name in places:
        known = done.get((place, name))
        if known and not (name in unfinished and sessions[name].drafter.remembers):
            continue
        found = answer(sessions[name], name, questions[place], base, template, max_new_tokens)
        if not known:
            yield found
        elif outcome(found) != outcome(known):
            warnings.warn(
                f"{name} does not decode question {found.question_id} as it did before the stop: this device does not "
                "repeat itself, so what follows may differ from a run without a stop",
                stacklevel=2,
            )


def outcome(answer: Answer) -> list:
    """What two decodings of a question have in common where nothing but their time differs."""
    steps = [[(step.emitted, step.accepted, step.fed, step.draft_forwards) for step in t.steps] for t in answer.turns]
    return [[turn.token_ids for turn in answer.turns], steps]
