"""Static trees: paths of ranks, found once and filled with the most probable tokens of each draft."""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from drafters.tree import DraftTree

RankPath = tuple[int, ...]
"""The rank of each node's token among the most probable ones at its depth, from the root down."""


def static_tree(accuracies: np.ndarray, num_nodes: int) -> list[RankPath]:
    """The static tree of ``num_nodes`` rank paths with the largest expected number of accepted tokens.

    As in Medusa, section 2.3.3, the depths are taken to be right independently of each other. A node is then accepted
    with the product of the accuracies along its path: (K, k) how often the token of each rank is right, at each depth.
    The paths come most probable first and thus parents before children; those that are never right are left out.
    """
    table = np.asarray(accuracies, dtype=float).tolist()
    first = table[0] if table else []
    queue: list[tuple[float, RankPath]] = [(-accuracy, (rank,)) for rank, accuracy in enumerate(first) if accuracy > 0]
    heapify(queue)
    paths: list[RankPath] = []
    while queue and len(paths) < num_nodes:
        weight, path = heappop(queue)
        paths.append(path)
        if len(path) < len(table):
            for rank, accuracy in enumerate(table[len(path)]):
                if weight * accuracy < 0:
                    heappush(queue, (weight * accuracy, (*path, rank)))
    return paths


def checked(static: Sequence[Sequence[int]], max_depth: int, num_ranks: int) -> list[RankPath]:
    """The rank paths as tuples; ValueError if they are no tree of this depth, parents first."""
    try:
        paths = [tuple(int(rank) for rank in path) for path in static]
    except (TypeError, ValueError):
        raise ValueError("static must be a list of rank paths such as [[0], [0, 0], [1]]") from None
    earlier: set[RankPath] = {()}
    for path in paths:
        has_place = path not in earlier and path[:-1] in earlier and len(path) <= max_depth
        if not has_place or not 0 <= path[-1] < num_ranks:
            reason = f"it repeats a path, comes before its parent, or leaves {max_depth} levels or {num_ranks} ranks"
            raise ValueError(f"rank path {path} does not fit: {reason}")
        earlier.add(path)
    return paths


def fill(paths: Sequence[RankPath], tokens: np.ndarray) -> DraftTree:
    """Fill a static tree with the most probable tokens (K, k) of each depth, distinct within one."""
    rows = tokens.tolist()
    return DraftTree.from_paths([[row[rank] for row, rank in zip(rows, path, strict=False)] for path in paths])
