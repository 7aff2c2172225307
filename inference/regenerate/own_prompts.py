"""Prompts that the base writes itself: what it puts where a user's message would stand (Magpie, arXiv 2406.08464)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.conversations import Conversation
from data.templates import PRIVATE_USE, render
from inference.journal import Journal
from inference.regenerate.answerers import NUM_SEEDS, Answerer, Request
from inference.verifier.options import SamplingOptions
from inference.verifier.sampling import derived_seed

SAMPLING = SamplingOptions(temperature=0.85)
MAX_NEW_TOKENS = 192  # a longer message is left out


def own_prompts(
    answerer: Answerer,
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    count: int,
    seed: int,
    batch_size: int,
    journal: Journal,
    advance: Callable[[int, int, int], object] = lambda num_done, num_new, num_tokens: None,
) -> list[Conversation]:
    """Let the base write user messages, and return those that it ended, each once; raises ValueError if there are none.

    ``count`` messages are drawn with a seed, ``batch_size`` of them together. The journal has a line [first, replies]
    for each batch. The template is named as in `data.templates.resolve_template`; ``advance`` is that of `answer_all`.
    """
    before, end = user_turn(tokenizer, template)
    prompt = tokenizer(before, add_special_tokens=False).input_ids
    if (limit := min(MAX_NEW_TOKENS, answerer.max_length - len(prompt))) < 1:
        raise ValueError(f"max_length {answerer.max_length} leaves no room for prompts of the base's own: raise it")
    known: dict[int, Any] = dict(journal.entries(lambda entry: (int(entry[0]), list(map(answerer.read, entry[1])))))
    messages: dict[str, str] = {}
    for first in range(0, count, batch_size):
        num_new = 0
        if first not in known:
            seeds = (derived_seed(seed, place) % NUM_SEEDS for place in range(first, min(first + batch_size, count)))
            requests = [Request([], prompt, limit, replace(SAMPLING, seed=own), stop=end) for own in seeds]
            known[first] = answerer.answer(requests)
            journal.append([first, known[first]])
            num_new = len(requests)
        found = [_ended(reply, tokenizer, end) for reply in known[first]]
        num_tokens = sum(len(tokenizer(text).input_ids) for text in found) if num_new else 0
        messages |= {text.lower(): text for text in found if text}
        advance(len(found), num_new, num_tokens)
    if not messages:
        raise ValueError(
            f"the base ends none of {count} messages within {MAX_NEW_TOKENS} tokens: give prompts by --files"
        )
    return [Conversation(f"own-{row}", (("user", text),)) for row, text in enumerate(messages.values())]


def user_turn(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[str, str]:
    """What a chat template writes before a first user message, and the text behind it that ends one.

    Raises ValueError if it writes nothing behind it.
    """
    before, _, behind = render([("user", PRIVATE_USE[0])], tokenizer, template).partition(PRIVATE_USE[0])
    before = before.rstrip(" ")  # a space is part of the message's first token
    first = tokenizer(behind, add_special_tokens=False).input_ids[:1]
    if set(first) & set(tokenizer.all_special_ids):
        return before, str(tokenizer.decode(first))
    if not behind.strip():
        raise ValueError(
            "the chat template writes nothing behind a user's message, so none ends: give prompts by --files"
        )
    return before, behind.strip().partition("\n")[0]


def _ended(reply: Any, tokenizer: PreTrainedTokenizerBase, end: str) -> str:
    """The message of a reply, or nothing if it was cut off or refused."""
    if isinstance(reply, dict):
        return "" if reply["is_cut"] or reply["refused"] else reply["text"].strip()
    text, mark, _ = str(tokenizer.decode(reply)).partition(end)
    return text.strip() if mark else ""
