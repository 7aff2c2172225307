"""``drafters regenerate``: the base answers the prompts of a data set itself, so that a drafter learns its own text."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from data.conversation import Conversation, resolve_template
from data.sharegpt import load
from data.tokenizer import load_tokenizer, short_hash, tokenizer_hash
from inference.engine.base import Base, Dtype, base_hash, load_base, resolve_device
from inference.regeneration.batched import greedy_batch
from inference.regeneration.dialogue import Dialogue, Tally
from inference.regeneration.endpoint import Endpoint, Failing, Refused
from inference.runs.journal import Journal
from inference.runs.outputs import new_file
from inference.runs.progress import throughput_bar


@dataclass(frozen=True)
class Ask:
    """A turn that waits for its answer.

    Args:
        messages: (role, text) pairs, the last one the user's.
        prompt: Their tokens.
        room: Tokens of the answer at most.
    """

    messages: list[tuple[str, str]]
    prompt: list[int]
    room: int


class Writer(Protocol):
    """What writes answers: the base in this process, or a server."""

    def write(self, asks: Sequence[Ask]) -> list[Any]:
        """An answer for each, as a value of JSON."""

    def take(self, dialogue: Dialogue, prompt: list[int], reply: Any, tally: Tally) -> None:
        """Hand an answer to its conversation."""


class InProcess:
    """The base in this process; an answer is a list of token ids."""

    def __init__(self, base: Base) -> None:
        self.base = base

    def write(self, asks: Sequence[Ask]) -> list[list[int]]:
        """Decode all together; where the memory does not hold them, in halves."""
        try:
            return greedy_batch(self.base, [ask.prompt for ask in asks], [ask.room for ask in asks])
        except torch.OutOfMemoryError as error:
            if len(asks) == 1:
                raise ValueError(
                    f"no memory for one prompt of {len(asks[0].prompt)} tokens and an answer of {asks[0].room}: give a "
                    "smaller --max-length or another --dtype"
                ) from error
        torch.cuda.empty_cache()  # outside the handler, whose error still holds the tensors
        half = len(asks) // 2
        return self.write(asks[:half]) + self.write(asks[half:])

    def take(self, dialogue: Dialogue, prompt: list[int], reply: list[int], tally: Tally) -> None:
        dialogue.take_tokens(prompt, reply, self.base.eos, tally)


class Served:
    """A server; an answer is its text and counts, or why there is none."""

    def __init__(self, endpoint: Endpoint, concurrency: int) -> None:
        self.endpoint, self.concurrency = endpoint, concurrency

    def write(self, asks: Sequence[Ask]) -> list[dict[str, Any]]:
        """Ask for ``concurrency`` answers at a time.

        Raises:
            ValueError: The server fails at them all, or `Endpoint.chat` says why none can be answered.
        """
        with ThreadPoolExecutor(self.concurrency) as pool:
            futures = [pool.submit(self._one, ask) for ask in asks]
            try:
                replies = [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        if len(replies) > 1 and all(reply.get("is_failing") for reply in replies):
            raise ValueError(
                f"{self.endpoint.url} fails at all of {len(replies)} requests ({replies[0]['refused']}): "
                "look after it, then the same command goes on"
            )
        return replies

    def _one(self, ask: Ask) -> dict[str, Any]:
        try:
            return vars(self.endpoint.chat(ask.messages, ask.room))
        except Refused as refused:
            return {"refused": str(refused), "is_failing": isinstance(refused, Failing)}

    def take(self, dialogue: Dialogue, prompt: list[int], reply: dict[str, Any], tally: Tally) -> None:
        if "refused" in reply:
            return dialogue.stop(f"the server refuses: {reply['refused']}", tally)
        tally.num_other_prompts += reply["num_read"] not in (None, len(prompt))
        return dialogue.take_text(reply["text"], reply["is_cut"], reply["num_written"], tally)


def answer_all(
    dialogues: Sequence[Dialogue],
    writer: Writer,
    journal: Journal,
    batch_size: int,
    max_new_tokens: int,
    max_length: int,
    advance: Callable[[int, int, int], object] = lambda num_done, num_new, num_tokens: None,
) -> Tally:
    """Answer every conversation, all of them one turn further at a time, in batches of prompts of similar length.

    What the journal holds is taken from it, and batches are made as if it were empty: so a work that was stopped ends
    in the same texts, bit for bit, where `batch_size` is the same.

    Args:
        dialogues: What is asked.
        writer: What answers.
        journal: Of lines [turn, [[place of the conversation, answer], ...]], a line for each batch.
        batch_size: Prompts answered together; the longest come first, so that a lack of memory shows at once.
        max_new_tokens: Tokens of an answer at most.
        max_length: Tokens of prompt and answer at most.
        advance: Told of answers that are done, how many of these were made now, and of how many tokens.
    """
    known = {(turn, place): reply for turn, replies in journal for place, reply in replies}
    tally, turn = Tally(), 0
    while any(dialogue.num_left for dialogue in dialogues):
        asks: dict[int, Ask] = {}
        for place, dialogue in enumerate(dialogues):
            if not dialogue.num_left:
                continue
            num_left = dialogue.num_left
            if ask := _ask(dialogue, max_new_tokens, max_length, tally):
                asks[place] = ask
            else:
                advance(num_left, 0, 0)
        order = sorted(asks, key=lambda place: (-len(asks[place].prompt), place))
        for first in range(0, len(order), batch_size):
            batch = order[first : first + batch_size]
            new = [place for place in batch if (turn, place) not in known]
            if new:
                replies = writer.write([asks[place] for place in new])
                journal.append([turn, list(zip(new, replies, strict=True))])
                known |= {(turn, place): reply for place, reply in zip(new, replies, strict=True)}
            before, num_left = tally.num_tokens, sum(dialogues[place].num_left for place in batch)
            for place in batch:
                writer.take(dialogues[place], asks[place].prompt, known.pop((turn, place)), tally)
            num_done = num_left - sum(dialogues[place].num_left for place in batch)
            advance(num_done, len(new), (tally.num_tokens - before) if new else 0)
        turn += 1
    return tally


def _ask(dialogue: Dialogue, max_new_tokens: int, max_length: int, tally: Tally) -> Ask | None:
    try:
        prompt = dialogue.prompt()
    except ValueError as error:
        return dialogue.stop(str(error), tally)
    room = min(max_new_tokens, max_length - len(prompt))
    if room < 1:
        return dialogue.stop("the prompt leaves no room for an answer", tally)
    return Ask(dialogue.waiting, prompt, room)


def regenerate(
    base: str,
    files: list[str],
    out: str,
    template: str = "tokenizer",
    turns: Literal["all", "first"] = "all",
    limit: int | None = None,
    max_new_tokens: int = 512,
    max_length: int | None = None,
    batch_size: int = 64,
    dtype: Dtype = "float32",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    endpoint: str | None = None,
    model: str | None = None,
    concurrency: int = 16,
    overwrite: bool = False,
) -> None:
    """Let the base answer the prompts of conversations itself, greedily: text that a drafter learns best from.

    Writes records that training reads back with the very tokens the base wrote. Stopped, the same command goes on. With
    --endpoint an OpenAI-compatible server answers (its key in OPENAI_API_KEY), and the base gives only its tokenizer.

    Args:
        base: Folder or hub id of the base.
        files: ShareGPT files, or embedded; their answers are not looked at. May be repeated.
        out: JSONL file to write; until it is whole, OUT.partial holds what is done.
        template: Chat template: the tokenizer's own, vicuna_v1.1 or llama2_chat.
        turns: Answer all turns of a conversation, its earlier answers before it, or the first alone.
        limit: Conversations at most.
        max_new_tokens: Tokens of an answer at most; one that is cut there has no EOS.
        max_length: Tokens of a conversation at most, by default what the base can read.
        batch_size: Prompts answered together, halved where the GPU's memory does not hold them; a stop loses so many.
        dtype: Number format of the base.
        device: auto takes the GPU where there is one.
        endpoint: Address of a server that answers instead, such as http://localhost:8000/v1.
        model: Name of the base on that server.
        concurrency: Requests to that server at a time.
        overwrite: Replace a file that is already there, and a partial one of another command.
    """
    numbers = {"limit": limit, "max_new_tokens": max_new_tokens, "max_length": max_length, "batch_size": batch_size}
    for name, number in (numbers | {"concurrency": concurrency}).items():
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, not {number}")
    if (endpoint is None) != (model is None):
        raise ValueError("--endpoint and --model belong together: the server's address, and its name for the base")
    path = new_file(out, overwrite)
    conversations, dropped = load(files, limit, needs_answers=False)
    tokenizer = load_tokenizer(base)
    rendered = resolve_template(template, tokenizer)
    writer: Writer
    if endpoint is not None:
        writer = Served(Endpoint(endpoint, model), concurrency)
        weights, longest = f"{model} on a server", tokenizer.model_max_length
    else:
        loaded = load_base(base, dtype, resolve_device(device))
        writer = InProcess(loaded)
        weights, longest = base_hash(loaded), loaded.context_length
        if max_length is not None and max_length > longest:
            raise ValueError(f"max_length is {max_length}, but the context of {base} ends at {longest}")
    work = {
        "format": 1,
        "conversations": _digest(conversations),
        "base": weights,
        "tokenizer": tokenizer_hash(tokenizer),
        "template": short_hash(rendered),
        "turns": turns,
        "max_new_tokens": max_new_tokens,
        "max_length": max_length or longest,
    }
    dialogues = [Dialogue(each, tokenizer, template, 1 if turns == "first" else None) for each in conversations]
    with Journal(
        path.with_name(f"{path.name}.partial"), work, existing="replace_if_different" if overwrite else "continue"
    ) as journal:
        with throughput_bar("regenerate", sum(dialogue.num_left for dialogue in dialogues)) as advance:
            tally = answer_all(dialogues, writer, journal, batch_size, max_new_tokens, max_length or longest, advance)
        if not tally.num_answers:
            journal.delete()  # so that another try asks again
            raise ValueError(f"no prompt was answered: {tally.dropped}")
        unfinished = path.with_name(f"{path.name}.writing")
        with unfinished.open("w", encoding="utf-8") as stream:
            stream.writelines(_lines(dialogues))
        os.replace(unfinished, path)
        journal.delete()
    for left_out in (dropped, tally.dropped):
        if left_out.total:
            print(left_out)
    print(f"wrote {out}: {summary(dialogues, tally, is_served=endpoint is not None)}")


def summary(dialogues: Sequence[Dialogue], tally: Tally, is_served: bool) -> str:
    """What was written, and how well text and tokens fit, in one line."""
    whole = sum(bool(dialogue.is_cut) for dialogue in dialogues)
    like = "have as many tokens as the server counted" if is_served else "give back their tokens when read as text"
    parts = [
        f"{whole:,} of {len(dialogues):,} conversations, {tally.num_answers:,} answers, {tally.num_tokens:,} tokens",
        f"{tally.num_cut:,} answers cut short, which have no EOS",
        f"{tally.num_alike / tally.num_answers:.1%} of the answers {like}",
    ]
    if tally.num_lost:
        parts.append(f"{tally.num_lost:,} tokens left out of the loss, as a later turn renders them otherwise")
    if tally.num_other_prompts:
        parts.append(f"{tally.num_other_prompts:,} prompts have another length on the server: is --template its own?")
    return "; ".join(parts)


def _lines(dialogues: Sequence[Dialogue]) -> Iterator[str]:
    for dialogue in dialogues:
        if dialogue.is_cut:
            yield json.dumps(dialogue.record(), ensure_ascii=False, separators=(",", ":")) + "\n"


def _digest(conversations: Sequence[Conversation]) -> str:
    return short_hash(json.dumps([[each.id, each.messages] for each in conversations]))
