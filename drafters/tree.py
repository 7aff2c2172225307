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
    """The distribution that the drafted children of one node were sampled from, which exact rejection sampling needs.

    Args:
        parent: Parent of the children, or `ROOT`.
        probs: (V,) probabilities of the sampled tokens, after every logits warper.
        draws: The children in the order they were sampled. A node may be repeated if sampling was with replacement.
        replacement: Whether the tokens were sampled with replacement.
    """

    parent: int
    probs: Tensor
    draws: tuple[int, ...]
    replacement: bool = True


@dataclass(frozen=True)
class DraftTree:
    """Candidate continuations of one sequence, merged by common prefix.

    The root (parent -1) is the last token of the text so far; it is not a node. Parents come before their children, and
    candidate siblings have distinct tokens.

        the ─┬─ cat ── sat        tokens  = [cat, sat, dog]
             └─ dog               parents = [ -1,   0,  -1]

    Args:
        tokens: Token of each node.
        parents: Index of each node's parent, or `ROOT`.
        num_scratch: Number of scratch nodes, which come last. The base reads them for their logits, but they are never
            accepted. Their parent may be any earlier node; a candidate's parent is never a scratch node.
        distributions: The distributions that children were sampled from; empty if none were sampled.
        probabilities: The drafter's estimate of the probability of each candidate's path; empty if the drafter gives
            none. With them, a budget may feed only the first nodes. Ignored when trees are compared.
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
        """Return this tree with scratch nodes appended; ``parents`` are indices into the combined tree."""
        return replace(
            self,
            tokens=[*self.tokens, *tokens],
            parents=[*self.parents, *parents],
            num_scratch=self.num_scratch + len(tokens),
        )

    @property
    def num_candidates(self) -> int:
        """Number of nodes that may be accepted; they come before the scratch nodes."""
        return len(self.tokens) - self.num_scratch

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        pairs = zip(self.parents, self.tokens, strict=True)
        return {pair: node for node, pair in zip(range(self.num_candidates), pairs, strict=False)}

    def child(self, parent: int, token: int) -> int | None:
        """Return the candidate child of ``parent`` with the token ``token``, or None."""
        return self._children.get((parent, token))

    def follow(self, tokens: Iterable[int]) -> list[int]:
        """Return the path of candidates, from the root down, that matches the longest drafted prefix of ``tokens``.

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

    def first_path(self, max_depth: int) -> list[int]:
        """Return the tokens of the path that takes the first child at every node, for engines that verify chains only.

        Drafters list the more probable child first.

        Args:
            max_depth: Largest number of tokens.

        >>> DraftTree(tokens=[7, 8, 9], parents=[-1, -1, 0]).first_path(4)
        [7, 9]
        """
        tokens: list[int] = []
        last = ROOT
        for node in range(self.num_candidates):
            if self.parents[node] == last and len(tokens) < max_depth:
                tokens.append(self.tokens[node])
                last = node
        return tokens

    @cached_property
    def depths(self) -> list[int]:
        """Depth of each node, 1 for children of the root; a node's position is that of the root plus its depth."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    def ancestor_mask(self) -> np.ndarray:
        """Return the attention mask of the tree, where each node attends to itself and its ancestors.

        Returns:
            (M, M) bool; rows are queries and columns are keys.
        """
        ancestor_mask = np.eye(len(self), dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent != ROOT:
                ancestor_mask[node] |= ancestor_mask[parent]
        return ancestor_mask

    def first(self, num_nodes: int) -> DraftTree:
        """Return the tree of the first ``num_nodes`` nodes, of a tree without scratch nodes and drawn children."""
        if num_nodes >= len(self):
            return self
        assert not (self.num_scratch or self.distributions), "this tree is fed as a whole"
        return DraftTree(
            self.tokens[:num_nodes], self.parents[:num_nodes], probabilities=self.probabilities[:num_nodes]
        )

    def path_tokens(self, node: int) -> list[int]:
        """Return the tokens on the path from the root (excluded) to ``node`` (included)."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def pruned(
        self, max_depth: int, max_nodes: int, eos: Collection[int], max_scratch_depth: int | None = None
    ) -> DraftTree:
        """Return the tree without the nodes that exceed the limits; the tree itself if none does.

        Args:
            max_depth: Largest depth of a candidate.
            max_nodes: Largest number of nodes; the first ones are kept.
            eos: End-of-sequence tokens. Candidates below one are removed.
            max_scratch_depth: Largest depth of a scratch node. By default the same as `max_depth`.
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
        """Whether a candidate's parent is an end-of-sequence token."""
        if not eos or frozenset(eos).isdisjoint(self.tokens):
            return False
        parents = self.parents[: self.num_candidates]
        return any(parent != ROOT and self.tokens[parent] in eos for parent in parents)

    def validate(self, vocab_size: int) -> None:
        """Raise AssertionError if the drafter built a malformed tree."""
        candidates = self.num_candidates
        assert len(self.tokens) == len(self.parents), "a node has one token and one parent"
        assert 0 <= self.num_scratch <= len(self.tokens), "num_scratch is out of range"
        assert all(ROOT <= parent < node for node, parent in enumerate(self.parents)), "parents come before children"
        assert all(parent < candidates for parent in self.parents[:candidates]), (
            "no candidate has a scratch node as its parent"
        )
        assert len(self._children) == candidates, "candidate siblings have distinct tokens"
        assert all(0 <= token < vocab_size for token in self.tokens), "a token is outside the vocabulary"
        assert len(self.probabilities) in (0, candidates), "either every candidate has a probability or none has"
        for distribution in self.distributions:
            assert all(self.parents[node] == distribution.parent for node in distribution.draws), (
                "draws are children of their distribution's parent"
            )
            assert all(node < candidates for node in distribution.draws), "a sampled node is a candidate"
