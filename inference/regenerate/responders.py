"""What answers the prompts: the base in this process, or a server that hosts it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from data.files import redacted, validated
from inference.regenerate.batched import decode_batch
from inference.regenerate.dialogue import AnswerCounts, Dialogue
from inference.regenerate.endpoint import ChatAnswer, Endpoint, RequestFailed, RequestRefused
from inference.verifier.base import Base
from inference.verifier.options import GREEDY, SamplingOptions
from inference.verifier.sampling import KeyedSampler


@dataclass(frozen=True)
class Request:
    """A turn that waits for its answer.

    Args:
        messages: (role, text) pairs, the last one from the user.
        prompt: Token ids of these messages.
        max_new_tokens: Maximum number of tokens of the answer.
        sampling: How the answer is sampled, with a seed of its own.
    """

    messages: list[tuple[str, str]]
    prompt: list[int]
    max_new_tokens: int
    sampling: SamplingOptions = GREEDY


class Responder(Protocol):
    """Answers requests. A reply is a JSON value, so that a journal can hold it."""

    def answer(self, requests: Sequence[Request]) -> Sequence[Any]:
        """Return a reply to each request."""

    def read(self, reply: Any) -> Any:
        """Return a reply that a journal holds; raises ValueError if this responder cannot have given it."""

    def add(self, dialogue: Dialogue, prompt: list[int], reply: Any, counts: AnswerCounts) -> None:
        """Add a reply to its conversation."""


class LocalResponder:
    """The base in this process; a reply is a list of token ids."""

    def __init__(self, base: Base) -> None:
        self.base = base

    def answer(self, requests: Sequence[Request]) -> list[list[int]]:
        """Decode all requests in one batch, or in two halves if the memory does not suffice."""
        limits = [request.max_new_tokens for request in requests]
        samplers = [request.sampling.sampler() for request in requests]
        keyed = [sampler for sampler in samplers if isinstance(sampler, KeyedSampler)]
        try:
            return decode_batch(self.base, [request.prompt for request in requests], limits, keyed)
        except torch.OutOfMemoryError as error:
            if len(requests) == 1:
                raise ValueError(
                    f"not enough memory for one prompt of {len(requests[0].prompt)} tokens and an answer of "
                    f"{limits[0]}: give a smaller --max-length or another --dtype"
                ) from error
        torch.cuda.empty_cache()  # outside the handler, where the error no longer keeps the tensors alive
        half = len(requests) // 2
        return self.answer(requests[:half]) + self.answer(requests[half:])

    def read(self, reply: Any) -> list[int]:
        """Return a reply of at least one token of the base's vocabulary."""
        tokens = validated(list[int], reply)
        if not tokens or not 0 <= min(tokens) <= max(tokens) < self.base.model.config.vocab_size:
            raise ValueError("not an answer of this base")
        return tokens

    def add(self, dialogue: Dialogue, prompt: list[int], reply: list[int], counts: AnswerCounts) -> None:
        """Add the answer's tokens to its conversation."""
        dialogue.add_tokens(prompt, reply, self.base.eos, counts)


class ServerResponder:
    """A server; a reply is the fields of a `ChatAnswer`, or the reason why there is none.

    Args:
        endpoint: Route of the server.
        concurrency: Maximum number of requests at the same time.
    """

    def __init__(self, endpoint: Endpoint, concurrency: int) -> None:
        self.endpoint, self.concurrency = endpoint, concurrency

    def answer(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        """Send the requests, up to ``concurrency`` of them at the same time.

        Raises:
            ValueError: The server fails at every request, or `Endpoint.chat` finds that no request can succeed.
        """
        with ThreadPoolExecutor(self.concurrency) as pool:
            futures = [pool.submit(self._reply, request) for request in requests]
            try:
                replies = [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        if len(replies) > 1 and all(reply.get("is_failing") for reply in replies):
            raise ValueError(
                f"{self.endpoint.url} fails at all of {len(replies)} requests ({replies[0]['refused']}): "
                "repair the server, then repeat the command to continue"
            )
        return replies

    def read(self, reply: Any) -> dict[str, Any]:
        """Return a reply, or a refusal, with all its fields."""
        if "refused" in reply:
            return {"refused": str(reply["refused"])}
        return vars(validated(ChatAnswer, reply))

    def _reply(self, request: Request) -> dict[str, Any]:
        try:
            answer = self.endpoint.chat(request.messages, request.max_new_tokens, request.sampling)
            # A server may echo the key.
            return vars(replace(answer, text=redacted(answer.text), reasoning=redacted(answer.reasoning)))
        except RequestRefused as refused:
            return {"refused": str(refused), "is_failing": isinstance(refused, RequestFailed)}

    def add(self, dialogue: Dialogue, prompt: list[int], reply: dict[str, Any], counts: AnswerCounts) -> None:
        """Add the answer's text to its conversation, or leave the conversation if the server refused it."""
        if "refused" in reply:
            return dialogue.stop(f"the server refuses: {reply['refused']}", counts)
        counts.num_other_prompts += reply["num_read"] not in (None, len(prompt))
        text, reasoning = (reply[part].encode("utf-8", "replace").decode() for part in ("text", "reasoning"))
        return dialogue.add_text(text, reply["is_cut"], reply["num_written"], counts, reasoning)
