"""The draft tree: candidate continuations of one sequence, merged by common prefix."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

ROOT = -1


@dataclass(frozen=True)
class DraftTree:
    """Candidate continuations of one sequence, merged by common prefix.

    The root (parent -1) is the last decided token; it is not a node. Parents come before children, and
    siblings hold distinct tokens.

        the ─┬─ cat ── sat        tokens  = [cat, sat, dog]
             └─ dog               parents = [ -1,   0,  -1]
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()

    @classmethod
    def from_paths(cls, paths: Collection[Sequence[int]]) -> DraftTree:
        """Merge token paths that all start below the root into one tree."""
        tokens: list[int] = []
        parents: list[int] = []
        index: dict[tuple[int, int], int] = {}
        for path in paths:
            node = ROOT
            for token in path:
                if (node, token) not in index:
                    index[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = index[node, token]
        return cls(tokens, parents)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        return {
            (parent, token): node for node, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True))
        }

    def child(self, parent: int, token: int) -> int | None:
        """The child of ``parent`` that holds ``token``, if there is one."""
        return self._children.get((parent, token))

    @cached_property
    def depths(self) -> list[int]:
        """Distance from the root, 1 for its children; position of a node = position of the root + depth."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    def sees(self) -> np.ndarray:
        """Which node sees which: itself and its ancestors.

        Returns:
            (M, M) bool, row = the node that looks.
        """
        sees = np.eye(len(self), dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent != ROOT:
                sees[node] |= sees[parent]
        return sees

    def path_tokens(self, node: int) -> list[int]:
        """The tokens from below the root down to ``node``."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def pruned(self, max_depth: int, max_nodes: int, eos: Collection[int]) -> DraftTree:
        """The first ``max_nodes`` nodes no deeper than ``max_depth`` and not below an end-of-sequence token."""
        if len(self) <= max_nodes and max(self.depths, default=0) <= max_depth and not set(eos) & set(self.tokens):
            return self
        kept: dict[int, int] = {ROOT: ROOT}
        tokens: list[int] = []
        parents: list[int] = []
        for node, (token, parent, depth) in enumerate(zip(self.tokens, self.parents, self.depths, strict=True)):
            below_eos = parent != ROOT and self.tokens[parent] in eos
            if parent in kept and depth <= max_depth and not below_eos and len(tokens) < max_nodes:
                kept[node] = len(tokens)
                tokens.append(token)
                parents.append(kept[parent])
        return DraftTree(tokens, parents)

    def validate(self, vocab_size: int) -> None:
        """Raise AssertionError where a drafter has broken the tree's rules."""
        assert len(self.tokens) == len(self.parents), "a node has one token and one parent"
        assert all(ROOT <= parent < node for node, parent in enumerate(self.parents)), "parents come before children"
        assert len(self._children) == len(self), "siblings hold distinct tokens"
        assert all(0 <= token < vocab_size for token in self.tokens), "a token is outside the vocabulary"
