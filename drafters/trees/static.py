"""Static trees: paths of ranks, found once and filled with the most probable tokens of each draft."""

from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from drafters.tree import ROOT, DraftTree
from drafters.trees.dynamic import FeedBeam

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


def grow(logits: Tensor, feed: FeedBeam, paths: Sequence[RankPath]) -> list[DraftTree]:
    """The static trees at A roots of a drafter that predicts the next token at every node (EAGLE, arXiv 2401.15077).

    A node has the token of its rank among the most probable ones after its own parent. The nodes with children are fed
    to the draft module, one level after another. Takes logits (A, V) at the roots, and what runs the module.
    """
    num_ranks, levels, order, parents = _layout(tuple(paths), logits.device)
    tokens: list[Tensor] = []  # (A, n) of each level
    logits = logits[:, None]  # (A, W, V)
    for places, inner_nodes, slots in levels:
        tokens.append(logits.topk(num_ranks).indices.flatten(1)[:, places])
        if len(inner_nodes):
            logits = feed(tokens[-1][:, inner_nodes], slots.expand(len(logits), -1))
    return [DraftTree(row, parents) for row in torch.cat(tokens, dim=1)[:, order].tolist()]


@lru_cache(maxsize=8)
def _layout(
    paths: tuple[RankPath, ...], device: torch.device
) -> tuple[int, list[tuple[Tensor, ...]], Tensor, list[int]]:
    """What `grow` needs of a tree; it is copied to the device only once.

    Returns the number of ranks k, the levels, the place of each node among the nodes of all levels, and the parents. A
    level says where its n tokens stand among the W * k of the beam, which of them are inner nodes, and whose slots.
    """
    inner, num_ranks = {path[:-1] for path in paths}, 1 + max(path[-1] for path in paths)
    beam: list[RankPath] = [()]  # the nodes whose children make the level
    numbers, nodes = list[list[int]](), list[RankPath]()
    while beam:
        level = [path for path in paths if path[:-1] in beam]
        slots = [beam.index(path[:-1]) for path in level]
        places = [slot * num_ranks + path[-1] for slot, path in zip(slots, level, strict=True)]
        inner_nodes = [node for node, path in enumerate(level) if path in inner]
        numbers += [places, inner_nodes, [slots[node] for node in inner_nodes]]
        nodes, beam = nodes + level, [level[node] for node in inner_nodes]
    numbers.append([nodes.index(path) for path in paths])
    *parts, order = torch.tensor(list(chain(*numbers)), device=device).split([len(part) for part in numbers])
    levels = [tuple(parts[at : at + 3]) for at in range(0, len(parts), 3)]
    return num_ranks, levels, order, [paths.index(path[:-1]) if len(path) > 1 else ROOT for path in paths]
