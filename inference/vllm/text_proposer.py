"""Drafters that read only tokens, as a proposer of vLLM: n-grams, corpora and datastores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from drafters.protocol import Drafter, Limits, StepResult
from drafters.tree import DraftTree
from inference.vllm.proposer import Proposer, logger
from inference.vllm.served_drafter import chain_builder

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(eq=False)
class AssignedDrafter:
    """A drafter and the text that it has followed so far."""

    drafter: Drafter
    tokens: list[int] = field(default_factory=list)  # the text, which grows in place as that of a session does
    text: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # (S,) the same, to compare
    chain: DraftTree = field(default_factory=DraftTree)  # what it proposed last

    def fits(self, text: np.ndarray) -> bool:
        """Whether a text continues the one that was followed."""
        length = len(self.tokens)
        if not 0 < length < len(text) or text[length - 1] != self.tokens[-1]:  # most texts differ there already
            return False
        return np.array_equal(self.text, text[:length])

    def propose(self, text: np.ndarray, limits: Limits, fits: bool) -> list[int]:
        """Observe the tokens that a text (S,) gained, or begin a new one that does not fit, and return a chain."""
        if fits:
            emitted = text[len(self.tokens) :].tolist()
            path = self.chain.follow(emitted[:-1])
            self.tokens += emitted
            self.drafter.observe(StepResult(1, self.chain, None, path, emitted))
        else:  # the prompt, and the token that its forward gave
            self.tokens = text.tolist()
            self.drafter.begin(self.tokens[:-1])
            self.drafter.observe(StepResult(1, DraftTree(), None, [], self.tokens[-1:]))
        self.chain = self.drafter.propose(self.tokens, limits)
        self.text = text.copy()  # vLLM reuses the array
        return list(self.chain.tokens)


class DrafterPool:
    """As many drafters, built by a function, as texts are decoded at the same time.

    vLLM hands over rows of tokens that it reorders, without the names of their requests. So each drafter is found by
    its text: of the drafters whose text a row continues, the one that knows most of it goes on. If there is none, the
    idle drafter that was used last begins the row's text, and keeps what it remembers of earlier ones.
    """

    def __init__(self, build: Callable[[], Drafter]) -> None:
        self._build = build
        self._drafters: list[AssignedDrafter] = []  # the one used last comes last

    def propose(self, texts: list[np.ndarray], limits: Limits) -> list[list[int]]:
        """Return a chain for each text."""
        longest_first = sorted(self._drafters, key=lambda drafter: len(drafter.tokens), reverse=True)
        matches = []
        for text in texts:
            best = next((drafter for drafter in longest_first if drafter.fits(text)), None)
            if best:
                longest_first.remove(best)
            matches.append(best)
        idle = [drafter for drafter in self._drafters if drafter not in matches]
        chosen = [best or (idle.pop() if idle else AssignedDrafter(self._build())) for best in matches]
        self._drafters = [*idle, *chosen]
        rows = zip(chosen, texts, matches, strict=True)
        return [drafter.propose(text, limits, fits=best is not None) for drafter, text, best in rows]


class TextProposer(Proposer):
    """Serves a drafter that reads nothing but tokens; ``drafter`` is its spec, such as ``anpd:order=4``."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self.pool = DrafterPool(chain_builder(self.spec, self.base, self.num_tokens))
        logger.info("%s drafts chains of up to %d tokens", self.spec, self.num_tokens)

    def draft(self, rows: list[int], texts: list[np.ndarray]) -> list[list[int]]:
        return self.pool.propose(texts, self.limits)
