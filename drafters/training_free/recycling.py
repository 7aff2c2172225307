"""Token recycling: drafts the tokens that the base found probable after the same token before."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush

from drafters.checks import check_at_least
from drafters.protocol import Drafter, Limits, RequiredOutputs, StepResult
from drafters.registry import register
from drafters.tree import ROOT, DraftTree

RankPath = tuple[int, ...]
"""The rank of each node's token among the successors of the token before it, from the root down."""


@register("token_recycling")
@dataclass(eq=False)
class TokenRecycling(Drafter):
    """Token recycling (Luo et al., arXiv 2408.08696).

    A table (the paper's adjacency matrix) maps each token to its likely successors. A fixed template of ranks says
    which successors are drafted, and which successors of those, in breadth-first order.

    The successors of a token are the base's ``top_k`` most probable tokens where it was last fed, as part of the text
    or of a draft, accepted or not; if it occurs several times in a step, its last node counts. The table is kept from
    text to text. A token that was never fed has no successors, so its part of the template is left out.

    Args:
        num_nodes: Number of nodes of the template; the paper's has 80.
        top_k: Number of successors kept per token.
    """

    num_nodes: int = 80
    top_k: int = 8

    def __post_init__(self) -> None:
        check_at_least(1, num_nodes=self.num_nodes, top_k=self.top_k)
        self.required_outputs = RequiredOutputs(top_k=self.top_k)
        self._successors: dict[int, Sequence[int]] = {}

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        self._root = seq[-1]
        tokens: list[int] = []
        parents: list[int] = []
        nodes: dict[RankPath, int] = {(): ROOT}  # of the rank paths that are drafted
        for path in best_first(min(self.num_nodes, limits.max_nodes), self.top_k):
            if (parent := nodes.get(path[:-1])) is None or len(path) > limits.max_depth:
                continue
            token = self._root if parent == ROOT else tokens[parent]
            successors = self._successors.get(token, ())
            if path[-1] < len(successors) and (parent == ROOT or token not in limits.eos):
                nodes[path] = len(tokens)
                tokens.append(successors[path[-1]])
                parents.append(parent)
        return DraftTree(tokens, parents)

    def observe(self, step: StepResult) -> None:
        self._successors.update(zip([self._root, *step.tree.tokens], step.top_tokens, strict=True))

    def reset(self) -> None:
        self._successors.clear()


def rank_probability(rank: int) -> float:
    """Return the probability that a token's successor of this rank is the next token of the text.

    Rounded from frequencies of two small chat bases: 0.51, 0.076, 0.037, 0.026, 0.017, ... (GSM8K) and 0.33, 0.099,
    0.040, 0.035, 0.030, ... (the embedded corpus).
    """
    return 0.09 / rank if rank else 0.45


@lru_cache(maxsize=64)
def best_first(num_nodes: int, top_k: int) -> list[RankPath]:
    """The ``num_nodes`` most probable paths of ``top_k`` ranks, by their `rank_probability`, level by level.

    >>> best_first(4, 8)
    [(0,), (1,), (0, 0), (0, 0, 0)]
    """
    queue: list[tuple[float, RankPath]] = [(-rank_probability(rank), (rank,)) for rank in range(top_k)]
    paths: list[RankPath] = []
    while len(paths) < num_nodes:
        weight, path = heappop(queue)
        paths.append(path)
        for rank in range(top_k):
            heappush(queue, (weight * rank_probability(rank), (*path, rank)))
    return sorted(paths, key=lambda path: (len(path), path))
