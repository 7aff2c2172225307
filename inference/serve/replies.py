"""The replies of the API: whole, or as the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from inference.serve.written_text import Addition, FinishReason, ShownStep, TokenLogprobs


@dataclass
class Choice:
    """One text of a reply as far as it is written.

    Args:
        text: The text.
        finish_reason: Why it has ended; None while it goes on.
        logprobs: Log probabilities of its tokens.
        steps: Its steps, if they were asked for.
        tokens: Its tokens.
        num_accepted: Draft tokens among them.
        num_rejected: Draft tokens that were rejected.
    """

    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    steps: list[ShownStep] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    num_accepted: int = 0
    num_rejected: int = 0

    def add(self, addition: Addition) -> None:
        """Add what a step wrote."""
        self.text += addition.text
        self.finish_reason = addition.finish_reason
        self.logprobs += addition.logprobs
        self.steps += [addition.step] if addition.step else []
        self.tokens += addition.tokens
        self.num_accepted += addition.num_accepted
        self.num_rejected += addition.num_rejected


class Reply:
    """The reply to one request, filled step by step.

    Args:
        model: Name of the model.
        is_chat: Whether it answers ``/v1/chat/completions``; otherwise ``/v1/completions``.
        prompt_lengths: Number of tokens of the prompt of each choice.
        num_per_prompt: Number of choices for each prompt, whose prompt is counted once.
        has_logprobs: Whether log probabilities were asked for.
        has_token_ids: Whether token ids were asked for.
    """

    def __init__(
        self,
        model: str,
        is_chat: bool,
        prompt_lengths: Sequence[int],
        num_per_prompt: int,
        has_logprobs: bool,
        has_token_ids: bool = False,
    ) -> None:
        self._is_chat, self._has_logprobs, self._has_token_ids = is_chat, has_logprobs, has_token_ids
        self._num_prompt_tokens = sum(prompt_lengths[::num_per_prompt])
        self.choices = [Choice() for _ in prompt_lengths]
        self._kind = "chat.completion" if is_chat else "text_completion"
        prefix = "chatcmpl" if is_chat else "cmpl"
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def add(self, index: int, addition: Addition) -> list[dict[str, Any]]:
        """Add what a step wrote to a choice, and return it as chunks of a stream."""
        choice = self.choices[index]
        is_first, offset = not choice.tokens, sum(len(each.token) for each in choice.logprobs)
        choice.add(addition)
        extra: dict[str, Any] = {"steps": [asdict(addition.step)]} if addition.step else {}
        extra |= self._token_ids(addition.tokens)
        logprobs = {"logprobs": self._logprobs(addition.logprobs, offset)}
        if not self._is_chat:
            end = {"finish_reason": addition.finish_reason}
            return [self._chunk([{"index": index, "text": addition.text, **logprobs, **end, **extra}])]
        delta = ({"role": "assistant"} if is_first else {}) | {"content": addition.text}
        chunks = [self._chunk([{"index": index, "delta": delta, **logprobs, "finish_reason": None, **extra}])]
        if addition.finish_reason:
            end = {"finish_reason": addition.finish_reason}
            chunks.append(self._chunk([{"index": index, "delta": {}, "logprobs": None, **end}]))
        return chunks

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream for which usage was asked."""
        return self._chunk([]) | {"usage": self._usage()}

    def whole(self) -> dict[str, Any]:
        """The whole reply."""
        choices = []
        for index, choice in enumerate(self.choices):
            text: dict[str, Any] = {"text": choice.text}
            if self._is_chat:
                text = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
            steps = {"steps": [asdict(step) for step in choice.steps]} if choice.steps else {}
            logprobs, reason = self._logprobs(choice.logprobs, 0), choice.finish_reason
            ids = self._token_ids(choice.tokens)
            choices.append({"index": index, **text, "logprobs": logprobs, "finish_reason": reason, **steps, **ids})
        return {**self._head, "object": self._kind, "choices": choices, "usage": self._usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = f"{self._kind}.chunk" if self._is_chat else self._kind
        return {**self._head, "object": kind, "choices": choices}

    def _usage(self) -> dict[str, Any]:
        num_tokens = sum(len(choice.tokens) for choice in self.choices)
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": self._num_prompt_tokens + num_tokens,
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(choice.num_accepted for choice in self.choices),
                "rejected_prediction_tokens": sum(choice.num_rejected for choice in self.choices),
            },
        }

    def _token_ids(self, tokens: list[int]) -> dict[str, list[int]]:
        return {"token_ids": list(tokens)} if self._has_token_ids else {}

    def _logprobs(self, tokens: Sequence[TokenLogprobs], offset: int) -> dict[str, Any] | None:
        """Log probabilities as the two routes write them.

        Args:
            tokens: The tokens.
            offset: Length of the text of the tokens before them.
        """
        if not self._has_logprobs:
            return None
        if self._is_chat:
            content = [
                _entry(each.token, each.logprob) | {"top_logprobs": [_entry(*other) for other in each.top]}
                for each in tokens
            ]
            return {"content": content, "refusal": None}
        offsets = []
        for each in tokens:
            offsets.append(offset)
            offset += len(each.token)
        return {
            "tokens": [each.token for each in tokens],
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": [dict(each.top) for each in tokens],
            "text_offset": offsets,
        }


def _entry(token: str, logprob: float) -> dict[str, Any]:
    """A token as a chat reply names it; no bytes are given for a part of a character."""
    is_whole = "\N{REPLACEMENT CHARACTER}" not in token
    return {"token": token, "logprob": logprob, "bytes": list(token.encode()) if is_whole else None}
