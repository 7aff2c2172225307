"""Best-first trees for drafters with one distribution a depth, and the static tree of measured accuracies."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush

import numpy as np
from numba import njit

from drafters.tree import ROOT, DraftTree

RankPath = tuple[int, ...]
"""Which of a head's most probable tokens each node of a path holds, from the root down; 0 is the most probable."""


def search(
    probs: np.ndarray,
    tokens: np.ndarray,
    num_nodes: int,
    max_depth: int,
    eos: Collection[int] = (),
    min_probability: float = 0.0,
) -> tuple[DraftTree, np.ndarray]:
    """The ``num_nodes`` most probable paths, where a path is as probable as the product of its nodes.

    A node is at most as probable as its parent, so the most probable nodes are a tree, and taking again and again
    the best child of any node taken before finds them (EAGLE-2, section 4; DDTree).

    Args:
        probs: (L, K, C), or (K, C) for L = 1: probability of each candidate at each depth. L is 1 where a depth's law
            does not depend on the node above, else C + 1: row l is the law below candidate l of the depth above, row
            C the law below the root.
        tokens: (K, C) ids of each depth's candidates, or (C,) where all depths have the same; of a token that stands
            more than once the first place counts.
        num_nodes: Node budget M.
        max_depth: Deepest node.
        eos: Tokens below which nothing is drafted.
        min_probability: Paths less probable than this are not fed.

    Returns:
        The tree, most probable node first, so parents before children, and the (M,) probabilities of its nodes.
    """
    return _tree(probs, tokens, num_nodes, max_depth, eos, min_probability, False)


def chain(
    probs: np.ndarray,
    tokens: np.ndarray,
    num_nodes: int,
    max_depth: int,
    eos: Collection[int] = (),
    min_probability: float = 0.0,
) -> tuple[DraftTree, np.ndarray]:
    """As `search`, but one path: below each node its most probable child alone."""
    return _tree(probs, tokens, num_nodes, max_depth, eos, min_probability, True)


def _tree(probs, tokens, num_nodes, max_depth, eos, min_probability, is_chain) -> tuple[DraftTree, np.ndarray]:
    probs = np.ascontiguousarray(probs if probs.ndim == 3 else probs[None])
    assert len(probs) in (1, probs.shape[2] + 1), "one law for all, or one below each candidate and one below the root"
    assert tokens.shape in (probs.shape[1:], probs.shape[2:]), "one row of candidates a depth, or one for all"
    rows = np.ascontiguousarray(tokens if tokens.ndim == 2 else tokens[None], dtype=np.int64)
    usable, ends = candidates(rows.ravel(), eos, probs.shape[2])
    usable = usable.reshape(rows.shape)
    limits = max(num_nodes, 0), int(max_depth), float(min_probability)  # another type would compile anew
    places, parents, reached = _grow(probs, usable, ends, *limits, is_chain)
    return DraftTree(rows.ravel()[places].tolist(), parents.tolist()), reached


def candidates(tokens: np.ndarray, eos: Collection[int] = (), row: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Which places of a row of candidates a search may take, and which end the text.

    Args:
        tokens: (C,) ids, or rows of ``row`` ids behind one another.
        eos: End-of-sequence tokens.
        row: Ids that belong together; all, if not given.

    Returns:
        (C,) 1.0 at the first place of each token in its row and 0.0 at the others, and (C,) bool, whether it is an
        end-of-sequence token.
    """
    return _candidates(tokens, np.fromiter(eos, np.int64, len(eos)), len(tokens) if row is None else row)


@njit(cache=True)
def _candidates(tokens, eos, row):
    usable, ends = np.ones(len(tokens)), np.zeros(len(tokens), np.bool_)
    for first in range(0, len(tokens), max(row, 1)):
        order = np.argsort(tokens[first : first + row], kind="mergesort")  # stable: equal ones keep their order
        for i in range(1, len(order)):
            if tokens[first + order[i]] == tokens[first + order[i - 1]]:
                usable[first + order[i]] = 0.0
    for end in eos:
        for j in range(len(tokens)):
            ends[j] |= tokens[j] == end
    return usable, ends


@njit(cache=True)
def _grow(probs, usable, ends, num_nodes, max_depth, min_probability, is_chain):
    """Places in the rows of candidates, parents and probabilities of the nodes.

    Group 0 is the root, group 1 + i is node i.
    """
    num_distributions, num_depths, num_candidates = probs.shape
    num_rows = len(usable)  # of candidates: one a depth, or one for all
    deepest = min(max_depth, num_depths)
    places, parents = np.empty(num_nodes, np.int64), np.empty(num_nodes, np.int64)
    reached, depths = np.ones(num_nodes + 1), np.zeros(num_nodes + 1, np.int64)
    scores = np.empty((num_nodes + 1, num_candidates))  # of children not yet taken; 0 where taken
    best, best_score = np.zeros(num_nodes + 1, np.int64), np.zeros(num_nodes + 1)
    num_found, opened, distribution = 0, 0, num_distributions - 1
    while True:
        depth = depths[opened]  # the children of the newest group
        if num_candidates > 0 and depth < deepest and (opened == 0 or not ends[places[opened - 1]]):
            row = depth if num_rows > 1 else 0
            for j in range(num_candidates):
                score = reached[opened] * probs[distribution, depth, j] * usable[row, j]
                scores[opened, j] = min(score, reached[opened])  # rounding must not lift a child above its parent
            best[opened] = np.argmax(scores[opened])
            best_score[opened] = scores[opened, best[opened]]
        if num_found == num_nodes:
            break
        group = opened if is_chain else np.argmax(best_score[: num_found + 1])
        score = best_score[group]
        if not score > 0.0 or score < min_probability:
            break
        child = best[group]
        row = depths[group] if num_rows > 1 else 0
        places[num_found], parents[num_found] = row * num_candidates + child, group - 1
        scores[group, child] = 0.0
        best[group] = np.argmax(scores[group])
        best_score[group] = scores[group, best[group]]
        num_found += 1
        opened, distribution = num_found, child if num_distributions > 1 else 0
        reached[opened], depths[opened] = score, depths[group] + 1
    return places[:num_found], parents[:num_found], reached[1 : num_found + 1]


def static(accuracies: np.ndarray, num_nodes: int) -> list[RankPath]:
    """The tree of ``num_nodes`` rank paths that is accepted deepest on average (Medusa, section 2.3.3).

    Where the ranks of the heads are right independently of each other, a node is accepted with the product of the
    accuracies along its path, and the sum over the nodes is the expected number of accepted tokens.

    Args:
        accuracies: (K, k) how often the token of each rank is the right one, for each head.
        num_nodes: Node budget M.

    Returns:
        The paths, the most probable first, so parents before children. Paths that are never right are left out.

    Raises:
        ValueError: The accuracies are no probabilities by head and rank.
    """
    table = np.asarray(accuracies, dtype=float)
    if table.ndim != 2 or not ((table >= 0) & (table <= 1)).all():
        raise ValueError("accuracies must be probabilities between 0 and 1, one row a head, one column a rank")
    queue = [(-accuracy, (rank,)) for rank, accuracy in enumerate(table[0] if len(table) else ()) if accuracy > 0]
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


def fill(paths: Sequence[RankPath], tokens: np.ndarray) -> DraftTree:
    """Put each head's most probable tokens into a tree of rank paths.

    Args:
        paths: Parents before children, as of `static`.
        tokens: (K, k) ids, each head's most probable first; distinct within a head.

    Raises:
        ValueError: A path does not fit the tokens, or stands before its parent.
    """
    index: dict[RankPath, int] = {(): ROOT}
    rows = tokens.tolist()
    filled, parents = [], []
    for path in paths:
        if path[:-1] not in index or path in index or len(path) > len(rows) or not 0 <= path[-1] < len(rows[0]):
            reason = f"it repeats a path, comes before its parent, or leaves the {len(rows)} heads' ranks"
            raise ValueError(f"rank path {tuple(path)} does not fit: {reason}")
        filled.append(rows[len(path) - 1][path[-1]])
        parents.append(index[path[:-1]])
        index[path] = len(index) - 1
    return DraftTree(filled, parents)
