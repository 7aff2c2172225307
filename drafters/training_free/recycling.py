"""Token recycling: drafts the tokens that the base found probable after the same token before."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from drafters.checks import check_at_least, check_choices
from drafters.protocol import Drafter, Limits, RequiredOutputs, StepResult
from drafters.registry import register
from drafters.tree import ROOT, DraftTree
from drafters.trees.static import RankPath, static_tree

# Number of children of each node of the authors' tree, level by level, from the root; zeros at the end left out.
PAPER_CHILDREN = (
    (8,),
    (8, 4, 3, 2, 1, 1, 1, 1),
    (8, 3, 2, 1, 1, 1, 1, 1, 2, 1, 0, 0, 1, 0, 0, 1, 0, 1, 1),
    (5, 2, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1),
    (3, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1),
    (2, 0, 0, 1),
)


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
        template: ``best_first``, the most probable paths of ranks by frequencies of our small bases; or ``paper``, the
            first ``num_nodes`` nodes of the tree that the authors published, which is fixed.
    """

    num_nodes: int = 80
    top_k: int = 8
    template: Literal["best_first", "paper"] = "best_first"

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(1, num_nodes=self.num_nodes, top_k=self.top_k)
        self.required_outputs = RequiredOutputs(top_k=self.top_k)
        self._successors: dict[int, Sequence[int]] = {}

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        self._root = seq[-1]
        num_nodes = min(self.num_nodes, limits.max_nodes)
        template = best_first(num_nodes, self.top_k) if self.template == "best_first" else paper_template(num_nodes)
        tokens: list[int] = []
        parents: list[int] = []
        nodes: dict[RankPath, int] = {(): ROOT}  # of the rank paths that are drafted
        for path in template:
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
    accuracies = np.array([[rank_probability(rank) for rank in range(top_k)]] * num_nodes)
    return sorted(static_tree(accuracies, num_nodes), key=lambda path: (len(path), path))


@lru_cache(maxsize=64)
def paper_template(num_nodes: int) -> list[RankPath]:
    """The first rank paths, level by level, of the 80 that the authors published (in Spec-Bench, version 2.2.2).

    >>> paper_template(10)[6:]
    [(6,), (7,), (0, 0), (0, 1)]
    """
    level: list[RankPath] = [()]
    paths: list[RankPath] = []
    for counts in PAPER_CHILDREN:
        level = [(*path, rank) for path, count in zip(level, counts, strict=False) for rank in range(count)]
        paths += level
    return paths[:num_nodes]
