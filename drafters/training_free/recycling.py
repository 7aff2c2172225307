"""Token recycling: the base's runners-up, thrown away elsewhere, are the next drafts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush

from drafters.protocol import Drafter, Limits, RequiredOutputs, StepResult
from drafters.tree import ROOT, DraftTree

Template = tuple["Template", ...]  # of a node: the templates of its children, the most probable first


class TokenRecycling(Drafter):
    """Token recycling (Luo et al., arXiv 2408.08696): a table gives each token its likely successors, and a fixed
    tree of ranks says which of them, and which of theirs, are drafted.

    The successors of a token are the base's ``top_k`` where it was fed last, decided or drafted, accepted or not; of
    several places in one step the last node counts. The table lives on from text to text. A token never fed has no
    successors, and what would stand below it is left out. Nodes are in breadth-first order.

    Args:
        num_nodes: Nodes of the tree of ranks; the paper's tree has 80.
        top_k: Successors kept of a token.
    """

    def __init__(self, num_nodes: int = 80, top_k: int = 8) -> None:
        if num_nodes < 1 or top_k < 1:
            raise ValueError(f"num_nodes and top_k must be at least 1, got {num_nodes} and {top_k}")
        self.num_nodes, self.top_k = num_nodes, top_k
        self.required_outputs = RequiredOutputs(top_k=top_k)
        self._successors: dict[int, Sequence[int]] = {}

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        self._root = seq[-1]
        tokens: list[int] = []
        parents: list[int] = []
        level = [(ROOT, self._root, best_first(min(self.num_nodes, limits.max_nodes), self.top_k))]
        for _ in range(limits.max_depth):
            below = []
            for parent, token, template in level:
                for child, grandchildren in zip(self._successors.get(token, ()), template, strict=False):
                    if grandchildren and child not in limits.eos:
                        below.append((len(tokens), child, grandchildren))
                    tokens.append(child)
                    parents.append(parent)
            level = below
            if not level:
                break
        return DraftTree(tokens, parents)

    def observe(self, step: StepResult) -> None:
        self._successors.update(zip([self._root, *step.tree.tokens], step.top, strict=True))

    def reset(self) -> None:
        self._successors.clear()


def rank_probability(rank: int) -> float:
    """How probable a token's successor of this rank, in the table, is the next one of the text.

    Rounded from what two small chat bases do, the last of the table against the next of the text: 0.51, 0.076, 0.037,
    0.026, 0.017, ... (GSM8K) and 0.33, 0.099, 0.040, 0.035, 0.030, ... (the embedded corpus).
    """
    return 0.09 / rank if rank else 0.45


@lru_cache(maxsize=64)
def best_first(num_nodes: int, top_k: int) -> Template:
    """The tree of the ``num_nodes`` most probable paths of ranks, where a path is as probable as the product of its
    ranks: under `rank_probability` no other tree of so many nodes is accepted deeper on average.

    >>> best_first(4, 8)  # ranks 0, 0-0, 0-0-0 and 1
    ((((),),), ())
    """
    queue = [(-rank_probability(rank), (rank,)) for rank in range(top_k)]
    heapify(queue)
    paths: list[tuple[int, ...]] = []
    while len(paths) < num_nodes:
        weight, path = heappop(queue)
        paths.append(path)
        for rank in range(top_k):
            heappush(queue, (weight * rank_probability(rank), (*path, rank)))
    below: dict[tuple[int, ...], Template] = {}
    for path in reversed(paths):  # children come after their parents, and siblings after those of smaller rank
        below[path[:-1]] = (below.pop(path, ()), *below.get(path[:-1], ()))
    return below.get((), ())
