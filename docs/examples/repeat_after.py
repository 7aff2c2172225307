"""A complete training-free drafter: what followed each token last time follows it again, along two branches."""

from __future__ import annotations

from collections.abc import Sequence

from drafters import Drafter, DraftTree, Limits, register


@register("repeat_after")
class RepeatAfter(Drafter):
    """Remembers the last two successors of every token and drafts a tree of two chains.

    Args:
        num_draft: Tokens of each chain.
    """

    remembers = False  # nothing is kept from one text to the next

    def __init__(self, num_draft: int = 4) -> None:
        self.num_draft = num_draft

    def begin(self, prompt: Sequence[int]) -> None:
        self._text: list[int] = []
        self._successors: dict[int, list[int]] = {}  # the newest comes first

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        self._read(seq)
        chains = [self._chain(first) for first in self._successors.get(seq[-1], [])]
        return DraftTree.from_paths(chains).pruned(limits.max_depth, limits.max_nodes, limits.eos)

    def rewind(self, length: int) -> None:
        shorter = self._text[:length]
        self.begin(shorter)
        self._read(shorter)

    def _read(self, seq: Sequence[int]) -> None:
        for token in seq[len(self._text) :]:
            if self._text:
                newest = self._successors.setdefault(self._text[-1], [])
                newest[:] = [token, *(other for other in newest if other != token)][:2]
            self._text.append(token)

    def _chain(self, token: int) -> list[int]:
        chain = [token]
        while len(chain) < self.num_draft and chain[-1] in self._successors:
            chain.append(self._successors[chain[-1]][0])
        return chain
