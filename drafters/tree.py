"""The draft tree: candidate continuations of one sequence, merged by common prefix."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from torch import Tensor

ROOT = -1


@dataclass(frozen=True)
class ChildDistribution:
    """The law that drafted children of one node were drawn from: what exact rejection needs to know.

    Args:
        parent: Node the children hang on, or `ROOT`.
        probs: (V,) probabilities the draws were made with, every warper applied.
        draws: The children in the order they were drawn. With replacement a node may stand more than once.
        replacement: Whether a drawn token could be drawn again.
    """

    parent: int
    probs: Tensor
    draws: tuple[int, ...]
    replacement: bool = True


@dataclass(frozen=True)
class DraftTree:
    """Candidate continuations of one sequence, merged by common prefix.

    The root (parent -1) is the last decided token; it is not a node. Parents come before children, and
    candidate siblings hold distinct tokens.

        the ─┬─ cat ── sat        tokens  = [cat, sat, dog]
             └─ dog               parents = [ -1,   0,  -1]

    Args:
        tokens: One token a node.
        parents: Index of each node's parent.
        num_scratch: So many nodes at the end are scratch: fed to be looked at, never accepted. They may hang on any
            node before them; no candidate hangs on one.
        laws: Where children were drawn at random, the laws they were drawn from.
        probabilities: What the drafter takes for the probability of each candidate's path, to be looked at; empty where
            it says none. No part of what is compared when trees are.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    num_scratch: int = 0
    distributions: tuple[ChildDistribution, ...] = ()
    probabilities: Sequence[float] = field(default=(), compare=False, repr=False)

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

    def with_scratch(self, tokens: Sequence[int], parents: Sequence[int]) -> DraftTree:
        """The same tree with scratch nodes behind it; ``parents`` counts from this tree's first node."""
        return replace(
            self,
            tokens=[*self.tokens, *tokens],
            parents=[*self.parents, *parents],
            num_scratch=self.num_scratch + len(tokens),
        )

    @property
    def num_candidates(self) -> int:
        """Nodes that may be accepted; they come first."""
        return len(self.tokens) - self.num_scratch

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        pairs = zip(self.parents, self.tokens, strict=True)
        return {pair: node for node, pair in zip(range(self.num_candidates), pairs, strict=False)}

    def child(self, parent: int, token: int) -> int | None:
        """The candidate child of ``parent`` that holds ``token``, if there is one."""
        return self._children.get((parent, token))

    def follow(self, tokens: Iterable[int]) -> list[int]:
        """Return the candidates that spell the longest drafted prefix of ``tokens``, from the root down.

        >>> DraftTree(tokens=[7, 8, 9], parents=[-1, 0, -1]).follow([7, 8, 5])
        [0, 1]
        """
        path: list[int] = []
        node = ROOT
        for token in tokens:
            child = self.child(node, token)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    @cached_property
    def depths(self) -> list[int]:
        """Distance from the root, 1 for its children; position of a node = position of the root + depth."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    def ancestor_mask(self) -> np.ndarray:
        """Which node sees which: itself and its ancestors.

        Returns:
            (M, M) bool, row = the node that looks.
        """
        ancestor_mask = np.eye(len(self), dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent != ROOT:
                ancestor_mask[node] |= ancestor_mask[parent]
        return ancestor_mask

    def path_tokens(self, node: int) -> list[int]:
        """The tokens from below the root down to ``node``."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def pruned(
        self, max_depth: int, max_nodes: int, eos: Collection[int], max_scratch_depth: int | None = None
    ) -> DraftTree:
        """The first ``max_nodes`` nodes, candidates no deeper than ``max_depth`` and not below an end-of-sequence
        token, scratch no deeper than ``max_scratch_depth`` (as candidates, if not given).

        A tree that keeps to this is returned itself.
        """
        scratch_depth = max_depth if max_scratch_depth is None else max_scratch_depth
        candidates, depths = self.num_candidates, self.depths
        if (
            len(self) <= max_nodes
            and max(depths[:candidates], default=0) <= max_depth
            and max(depths[candidates:], default=0) <= scratch_depth
            and not self._goes_on_after(eos)
        ):
            return self
        kept: dict[int, int] = {ROOT: ROOT}
        tokens: list[int] = []
        parents: list[int] = []
        kept_probabilities: list[float] = []
        num_scratch = 0
        for node, (token, parent, depth) in enumerate(zip(self.tokens, self.parents, depths, strict=True)):
            scratch = node >= candidates
            below_eos = not scratch and parent != ROOT and self.tokens[parent] in eos
            deep = depth > (scratch_depth if scratch else max_depth)
            if parent in kept and not deep and not below_eos and len(tokens) < max_nodes:
                kept[node] = len(tokens)
                tokens.append(token)
                parents.append(kept[parent])
                num_scratch += scratch
                if node < len(self.probabilities):
                    kept_probabilities.append(self.probabilities[node])
        distributions = tuple(
            replace(
                distribution,
                parent=kept[distribution.parent],
                draws=tuple(kept[node] for node in distribution.draws if node in kept),
            )
            for distribution in self.distributions
            if distribution.parent in kept
        )
        distributions = tuple(distribution for distribution in distributions if distribution.draws)
        return DraftTree(tokens, parents, num_scratch, distributions, kept_probabilities)

    def _goes_on_after(self, eos: Collection[int]) -> bool:
        """Whether a candidate hangs on an end-of-sequence token."""
        if not eos or frozenset(eos).isdisjoint(self.tokens):
            return False
        parents = self.parents[: self.num_candidates]
        return any(parent != ROOT and self.tokens[parent] in eos for parent in parents)

    def validate(self, vocab_size: int) -> None:
        """Raise AssertionError where a drafter has broken the tree's rules."""
        candidates = self.num_candidates
        assert len(self.tokens) == len(self.parents), "a node has one token and one parent"
        assert 0 <= self.num_scratch <= len(self.tokens), "scratch nodes are nodes"
        assert all(ROOT <= parent < node for node, parent in enumerate(self.parents)), "parents come before children"
        assert all(parent < candidates for parent in self.parents[:candidates]), "no candidate hangs on scratch"
        assert len(self._children) == candidates, "candidate siblings hold distinct tokens"
        assert all(0 <= token < vocab_size for token in self.tokens), "a token is outside the vocabulary"
        assert len(self.probabilities) in (0, candidates), "each candidate has a probability, or none has"
        for distribution in self.distributions:
            assert all(self.parents[node] == distribution.parent for node in distribution.draws), (
                "draws are children of their law's node"
            )
            assert all(node < candidates for node in distribution.draws), "a drawn node is a candidate"
