"""Best-first growth of a draft tree whose next tokens a Python function knows, node by node."""

from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from drafters.tree import ROOT, DraftTree
from drafters.trees.search import SearchLimits


def best_first(
    following: Callable[[int, float], Iterable[tuple[float, int]]],
    take: Callable[[int, int], object],
    limits: SearchLimits,
) -> DraftTree:
    """The tree of the most probable nodes, with their probabilities, most probable first.

    Among equally probable nodes the one whose parent was taken first comes first, and of siblings the one named first.

    Args:
        following: Takes a node or `ROOT`, and the probability of its path. Returns pairs of probability, given that
            path, and token of what may follow. Nodes that may have no children are not asked for.
        take: Is told the parent and the token of each node once it is taken.
        limits: Largest number and depth of the nodes, and their smallest probability.
    """
    tokens: list[int] = []
    parents: list[int] = []
    probabilities: list[float] = []
    heap: list[tuple[float, int, int, int, int]] = []  # (-probability, parent, rank, token, depth) of possible nodes
    node, probability, depth = ROOT, 1.0, 0
    while True:
        if depth < limits.max_depth and not (tokens and tokens[node] in limits.eos):
            for rank, (share, token) in enumerate(following(node, probability)):
                if probability * share >= limits.min_probability:
                    heappush(heap, (-probability * share, node, rank, token, depth + 1))
        if not heap or len(tokens) >= limits.num_nodes:
            return DraftTree(tokens, parents, probabilities=probabilities)
        negative_probability, parent, _, token, depth = heappop(heap)
        node, probability = len(tokens), -negative_probability
        tokens.append(token)
        parents.append(parent)
        probabilities.append(probability)
        take(parent, token)
