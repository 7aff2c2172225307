"""A text as it is decoded: what each step adds to it, where a stop string ends it, and its log probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch

from drafters.tree import DraftTree
from inference.generation import IncrementalDetokenizer
from inference.verifier.session import Session, StepCost

FinishReason = Literal["stop", "length"]
MIN_LOGPROB = -9999.0  # JSON has no infinity
NUM_KEPT_TOKEN_TEXTS = 1 << 16


@dataclass(frozen=True)
class TokenLogprobs:
    """The log probability of an emitted token under the base, before temperature, top_k and top_p.

    Args:
        token: Text of the token.
        logprob: Its log probability.
        top: Text and log probability of the base's most probable tokens, as many as were asked for.
    """

    token: str
    logprob: float
    top: list[tuple[str, float]]


@dataclass(frozen=True)
class ShownStep:
    """A step as the web page shows it.

    Args:
        num_accepted_characters: Characters of the step's text that come from accepted draft tokens; they come first.
        num_tokens: Tokens that the step emitted.
        num_fed: Tokens fed to the base.
        seconds: Duration of the step.
        tokens: Texts of the draft tree's nodes.
        parents: Parent of each node, -1 for the root.
        num_scratch: Number of scratch nodes, which come last.
        path: Accepted nodes.
    """

    num_accepted_characters: int
    num_tokens: int
    num_fed: int
    seconds: float
    tokens: list[str]
    parents: list[int]
    num_scratch: int
    path: list[int]


@dataclass(frozen=True)
class Addition:
    """What one step adds to a text.

    Args:
        text: Text that has become final. The end of a step's text may come with a later step.
        tokens: Tokens that the step emitted, up to the one that completes a stop string.
        num_accepted: Draft tokens among them.
        num_rejected: Other draft tokens that were fed and could have been accepted.
        logprobs: An entry for each emitted token except an end-of-sequence token; empty if they were not asked for.
        finish_reason: ``stop`` after an end-of-sequence token or a stop string, ``length`` at the maximum length, None
            while the text goes on.
        step: The step, if it was asked for.
    """

    text: str
    tokens: list[int]
    num_accepted: int
    num_rejected: int
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason | None
    step: ShownStep | None

    @property
    def num_tokens(self) -> int:
        """Number of these tokens."""
        return len(self.tokens)


class StopScanner:
    """Finds the end of a text that arrives in pieces and may contain stop strings.

    The text ends at the first character that completes a stop string, and lacks that stop string; if several are
    complete there, the longest. So the result does not depend on how the text is divided into pieces.

    Args:
        stops: The stop strings; none is empty.

    Attributes:
        is_found: Whether a stop string was found.

    >>> scanner = StopScanner(["\\n\\n"])
    >>> scanner.add("one\\n"), scanner.add("two\\n"), scanner.add("\\nthree"), scanner.is_found
    ('one', '\\ntwo', '', True)
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held, self.is_found = stops, "", False

    def add(self, piece: str) -> str:
        """Add a piece, and return the text that is final: that cannot be part of a stop string any more."""
        text, self._held = self._held + piece, ""
        ends = [(text.find(stop) + len(stop), -len(stop)) for stop in self._stops if stop in text]
        if ends:
            self.is_found = True
            return text[: sum(min(ends))]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """Return what is still held back when the text ends."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of a stop string with which the text ends."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


class TokenTexts:
    """The texts of single tokens, special tokens included, with the space before a word where there is one.

    Args:
        tokenizer: Tokenizer of the base.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Tokenizers drop the space before the first word of a text, so each token is decoded behind another one.
        self._before = list(tokenizer("a", add_special_tokens=False).input_ids)[-1:]
        self._prefix = self._decode(self._before)
        self.of: Callable[[int], str] = lru_cache(NUM_KEPT_TOKEN_TEXTS)(self._text)

    def _text(self, token: int) -> str:
        return self._decode([*self._before, token])[len(self._prefix) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)


class TextWriter:
    """Turns the steps of a session into a text, which ends at stop strings.

    Args:
        session: The session that decodes the text.
        token_texts: The texts of single tokens.
        eos: End-of-sequence tokens.
        end: Length of prompt and text at which the text ends.
        stops: Stop strings.
        num_logprobs: How many of the base's most probable tokens are reported with each token; None for no log
            probabilities at all.
        shows_steps: Whether each step is reported with its draft tree.
    """

    def __init__(
        self,
        session: Session,
        token_texts: TokenTexts,
        eos: frozenset[int],
        end: int,
        stops: Sequence[str] = (),
        num_logprobs: int | None = None,
        shows_steps: bool = False,
    ) -> None:
        self._session, self._token_texts, self._eos, self._end = session, token_texts, eos, end
        self._num_logprobs, self._shows_steps = num_logprobs, shows_steps
        self._scanner = StopScanner(stops)
        self._detokenizer = IncrementalDetokenizer(session.runner.base.tokenizer)

    def add(self, emitted: list[int], cost: StepCost) -> Addition:
        """Add the tokens of the session's last step. After one with a finish reason, the text is complete."""
        text, num_tokens, num_accepted_characters = "", 0, 0
        for token in emitted:
            text += self._scanner.add(self._detokenizer.add([token]))
            num_tokens += 1
            if num_tokens <= cost.accepted:
                num_accepted_characters = len(text)
            if self._scanner.is_found:
                break
        reason = self._finish_reason(emitted)
        if reason and not self._scanner.is_found:
            text += self._scanner.add(self._detokenizer.finish())
            text += self._scanner.finish()
            reason = self._finish_reason(emitted)  # the rest may have completed a stop string
        num_accepted = min(cost.accepted, num_tokens)
        return Addition(
            text=text,
            tokens=emitted[:num_tokens],
            num_accepted=num_accepted,
            num_rejected=cost.fed_candidates - num_accepted,
            logprobs=[] if self._num_logprobs is None else self._logprobs(emitted[:num_tokens], self._num_logprobs),
            finish_reason=reason,
            step=self._shown(cost, num_tokens, num_accepted_characters) if self._shows_steps else None,
        )

    def _finish_reason(self, emitted: list[int]) -> FinishReason | None:
        if self._scanner.is_found or emitted[-1] in self._eos:
            return "stop"
        return "length" if len(self._session.seq) >= self._end else None

    def _logprobs(self, tokens: list[int], num_top: int) -> list[TokenLogprobs]:
        tokens = tokens[:-1] if tokens[-1] in self._eos else tokens
        with torch.inference_mode():
            scores = self._session.last.emitted_logits()[: len(tokens)].double().log_softmax(-1)
            own = scores.gather(-1, torch.tensor(tokens, dtype=torch.int64, device=scores.device)[:, None])[:, 0]
            top = scores.topk(min(num_top, scores.shape[-1]))
        text_of = self._token_texts.of
        return [
            TokenLogprobs(
                text_of(token),
                max(logprob, MIN_LOGPROB),
                [(text_of(other), max(value, MIN_LOGPROB)) for other, value in zip(others, values, strict=True)],
            )
            for token, logprob, others, values in zip(
                tokens, own.tolist(), top.indices.tolist(), top.values.tolist(), strict=True
            )
        ]

    def _shown(self, cost: StepCost, num_tokens: int, num_accepted_characters: int) -> ShownStep:
        tree, path = self._session.last.tree, self._session.last.path
        return ShownStep(
            num_accepted_characters=num_accepted_characters,
            num_tokens=num_tokens,
            num_fed=cost.fed,
            seconds=sum(cost.seconds),
            tokens=_texts(tree, self._token_texts),
            parents=list(tree.parents),
            num_scratch=tree.num_scratch,
            path=path,
        )


def _texts(tree: DraftTree, token_texts: TokenTexts) -> list[str]:
    return [token_texts.of(token) for token in tree.tokens]
