"""The draft tree: candidate continuations of one sequence, merged by common prefix."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from torch import Tensor

ROOT = -1


def common_prefix(text: Sequence[object], other: Sequence[object], num_shared: int = 0) -> int:
    """Return how many leading tokens two texts share, at least ``num_shared``, which are not compared.

    >>> common_prefix([5, 6, 7], [5, 6, 8, 9])
    2
    """
    while num_shared < min(len(text), len(other)) and text[num_shared] == other[num_shared]:
        num_shared += 1
    return num_shared


class Growth:
    """A tree of candidates that grows node by node, merged by common prefix."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.index: dict[tuple[int, int], int] = {}  # the node of a parent and a token

    def child(self, parent: int, token: int) -> int:
        """The node with this token below the parent, added if it is new."""
        node = self.index.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
        return node


@dataclass(frozen=True)
class ChildDistribution:
    """What the drafted children of one node were sampled from, which exact rejection sampling needs."""

    parent: int  # of the children, or `ROOT`
    probs: Tensor  # (V,) probabilities of the sampled tokens, after every logits warper
    draws: tuple[int, ...]  # the children in the order they were sampled; as they are put back, one may be repeated


@dataclass(frozen=True)
class DraftTree:
    """Candidate continuations of one sequence, merged by common prefix.

    The root (parent -1) is the last token of the text so far; it is not a node. Parents come before their children,
    siblings have distinct tokens, and the more probable sibling comes first.

        the ─┬─ cat ── sat        tokens  = [cat, sat, dog]
             └─ dog               parents = [ -1,   0,  -1]

    Scratch nodes come last. The base reads them for their logits, but they are never accepted. Their parent may be any
    earlier node; a candidate's parent is never a scratch node.
    """

    tokens: Sequence[int] = ()  # token of each node
    parents: Sequence[int] = ()  # index of each node's parent, or `ROOT`
    num_scratch: int = 0  # number of scratch nodes
    distributions: tuple[ChildDistribution, ...] = ()  # what children were sampled from; empty if none were
    # The drafter's estimate of the probability of each candidate's path, or empty; a budget may then feed only the
    # first nodes. Ignored when trees are compared.
    probabilities: Sequence[float] = field(default=(), compare=False, repr=False)

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> DraftTree:
        """The tree of a single path."""
        return cls(tokens, range(-1, len(tokens) - 1))

    @classmethod
    def from_paths(cls, paths: Collection[Sequence[int]]) -> DraftTree:
        """Merge token paths that all start below the root into one tree."""
        grown = Growth()
        for path in paths:
            node = ROOT
            for token in path:
                node = grown.child(node, token)
        return cls(grown.tokens, grown.parents)

    def __len__(self) -> int:
        return len(self.tokens)

    def with_scratch(self, tokens: Sequence[int], parents: Sequence[int]) -> DraftTree:
        """Return this tree with scratch nodes appended; ``parents`` are indices into the combined tree."""
        num_scratch = self.num_scratch + len(tokens)
        tokens, parents = [*self.tokens, *tokens], [*self.parents, *parents]
        return replace(self, tokens=tokens, parents=parents, num_scratch=num_scratch)

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
        for token in tokens:
            child = self.child(path[-1] if path else ROOT, token)
            if child is None:
                break
            path.append(child)
        return path

    def first_path(self, max_depth: int) -> list[int]:
        """Return the tokens of the path that takes the first child at every node, for engines that verify chains only.

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
        """Return the attention mask (M, M) of the tree, bool, where each row attends to itself and its ancestors."""
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
        """Return the tree without the nodes that exceed the limits (`Limits`); the tree itself if none does."""
        scratch_depth = max_depth if max_scratch_depth is None else max_scratch_depth
        candidates = self.num_candidates
        place = {ROOT: ROOT}  # of each node that is kept
        for node, (parent, depth) in enumerate(zip(self.parents, self.depths, strict=True)):
            is_scratch = node >= candidates
            below_eos = not is_scratch and parent != ROOT and self.tokens[parent] in eos
            is_deep = depth > (scratch_depth if is_scratch else max_depth)
            if parent in place and not is_deep and not below_eos and len(place) <= max_nodes:
                place[node] = len(place) - 1
        nodes = list(place)[1:]
        if len(nodes) == len(self):
            return self
        distributions: list[ChildDistribution] = []
        for drawn in self.distributions:
            draws = tuple(place[node] for node in drawn.draws if node in place)
            if draws and drawn.parent in place:
                distributions.append(replace(drawn, parent=place[drawn.parent], draws=draws))
        return DraftTree(
            [self.tokens[node] for node in nodes],
            [place[self.parents[node]] for node in nodes],
            sum(node >= candidates for node in nodes),
            tuple(distributions),
            [self.probabilities[node] for node in nodes if node < len(self.probabilities)],
        )
