"""Best-first trees for drafters with one distribution per depth, and Medusa's static tree."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np
from numba import njit

from drafters.tree import ROOT, DraftTree

RankPath = tuple[int, ...]
"""A path in a static tree: the rank of each node's token among its head's most probable ones, from the root down."""


class Bias(NamedTuple):
    """Distributions after each of C candidates, in factors: p_t(v | l) = p_t(v) * factors[l, v] * scales[l, t].

    Together they are far smaller than a table (C + 1, T, C).

    Args:
        factors: (C + 1, C), or (C + 1, C + 1) with the blank last: exp B[l, v] up to a constant of its row. Row l holds
            after candidate l, row C after the root.
        scales: (C + 1, T) what makes the distributions sum to one over the vocabulary.
    """

    factors: np.ndarray
    scales: np.ndarray


def no_bias(probs: np.ndarray, num_columns: int) -> Bias:
    """The factors of distributions that ``probs`` (A, L, T, C) gives as they are."""
    num_drafts, _, num_frames, _ = probs.shape
    return Bias(np.ones((num_drafts, 1, num_columns), probs.dtype), np.ones((num_drafts, 1, num_frames), probs.dtype))


class SearchLimits(NamedTuple):
    """What a search may take.

    Args:
        num_nodes: Node budget M.
        max_depth: Largest depth of a node.
        eos: End-of-sequence tokens; nothing is drafted below them.
        min_probability: Nodes whose path is less probable than this are left out.
        is_chain: Whether to take a single path: below each node only its most probable child.
    """

    num_nodes: int
    max_depth: int
    eos: Collection[int] = ()
    min_probability: float = 0.0
    is_chain: bool = False

    def sizes(self) -> tuple[int, int, float, bool]:
        """The numbers in the types that the searches are compiled for."""
        return max(self.num_nodes, 0), int(self.max_depth), float(self.min_probability), self.is_chain


def search(
    probs: np.ndarray,
    tokens: np.ndarray,
    num_nodes: int,
    max_depth: int,
    eos: Collection[int] = (),
    min_probability: float = 0.0,
    bias: Bias | None = None,
) -> tuple[DraftTree, np.ndarray]:
    """The tree of the ``num_nodes`` most probable paths; the probability of a path is the product over its nodes.

    A node is at most as probable as its parent, so the most probable nodes form a tree. They are found by repeatedly
    taking the most probable child of any node taken before (EAGLE-2, section 4; DDTree).

    Args:
        probs: (L, K, C), or (K, C) for L = 1: probability of each candidate at each depth. L is 1 if the distribution
            at a depth does not depend on the parent, else C + 1: row l is the distribution below candidate l of the
            depth above, row C the distribution below the root.
        tokens: (K, C) ids of the candidates at each depth, or (C,) if all depths have the same. If a token occurs more
            than once, its first occurrence counts.
        num_nodes: Node budget M.
        max_depth: Largest depth of a node.
        eos: End-of-sequence tokens; nothing is drafted below them.
        min_probability: Paths less probable than this are left out.
        bias: The distributions below each candidate in factors, if ``probs`` has a single row.

    Returns:
        The tree, most probable node first and thus parents before children, and the (M,) probabilities of its nodes.
    """
    return _single(probs, tokens, SearchLimits(num_nodes, max_depth, eos, min_probability), bias)


def chain(
    probs: np.ndarray,
    tokens: np.ndarray,
    num_nodes: int,
    max_depth: int,
    eos: Collection[int] = (),
    min_probability: float = 0.0,
    bias: Bias | None = None,
) -> tuple[DraftTree, np.ndarray]:
    """As `search`, but a single path: below each node only its most probable child."""
    return _single(probs, tokens, SearchLimits(num_nodes, max_depth, eos, min_probability, is_chain=True), bias)


def _single(probs, tokens, limits, bias) -> tuple[DraftTree, np.ndarray]:
    probs = probs[None] if probs.ndim == 3 else probs[None, None]
    return search_batch(probs, tokens[None], limits, bias and Bias(*(part[None] for part in bias)))[0]


def search_batch(
    probs: np.ndarray, tokens: np.ndarray, limits: SearchLimits, bias: Bias | None = None
) -> list[tuple[DraftTree, np.ndarray]]:
    """What `search`, or `chain`, finds for each of A drafts, in a single call of the compiled search.

    Args:
        probs: (A, L, K, C), or (A, K, C) for L = 1.
        tokens: (A, K, C), or (A, C) if all depths of a draft have the same candidates.
        limits: What each of the searches may take.
        bias: Factors of A drafts, if ``probs`` has a single row for each.
    """
    probs = np.ascontiguousarray(probs if probs.ndim == 4 else probs[:, None])
    num_drafts, num_tables, num_depths, num_candidates = probs.shape
    assert num_tables in (1, num_candidates + 1), (
        "one distribution for all, or one below each candidate and one below the root"
    )
    assert tokens.shape in ((num_drafts, num_depths, num_candidates), (num_drafts, num_candidates)), (
        "one row of candidates per depth, or one for all"
    )
    rows = np.ascontiguousarray(tokens if tokens.ndim == 3 else tokens[:, None], dtype=np.int64)
    usable, ends = candidates(rows.ravel(), limits.eos, num_candidates)
    factors, scales = bias or no_bias(probs, num_candidates)
    by_draft = num_drafts, rows.shape[1] * num_candidates
    found = _grow_batch(probs, factors, scales, usable.reshape(rows.shape), ends.reshape(by_draft), *limits.sizes())
    return as_trees(rows.reshape(by_draft), *found)


def as_trees(
    tokens: np.ndarray, places: np.ndarray, parents: np.ndarray, probs: np.ndarray, sizes: np.ndarray
) -> list[tuple[DraftTree, np.ndarray]]:
    """The trees of A drafts, with the probabilities of their nodes.

    Args:
        tokens: (A, C) ids of the candidates.
        places: (A, M) the candidate of each node; those behind the last node are not read.
        parents: (A, M) index of each node's parent.
        probs: (A, M) probability of each node.
        sizes: (A,) numbers of nodes.
    """
    if not tokens.shape[1]:
        return [(DraftTree(), row[:0]) for row in probs]
    rows = zip(np.take_along_axis(tokens, places, 1).tolist(), parents.tolist(), probs, sizes.tolist(), strict=True)
    return [(DraftTree(row[:size], above[:size]), own[:size]) for row, above, own, size in rows]


def candidates(tokens: np.ndarray, eos: Collection[int] = (), row: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Which candidates a search may take, and which of them end the text.

    Args:
        tokens: (C,) ids, or several rows of ``row`` ids one after another.
        eos: End-of-sequence tokens.
        row: Length of a row; all candidates are one row by default.

    Returns:
        (C,) 1.0 at the first occurrence of each token in its row and 0.0 at repetitions, and (C,) bool, whether the
        token is an end-of-sequence token.
    """
    return _candidates(tokens, np.fromiter(eos, np.int64, len(eos)), len(tokens) if row is None else row)


@njit(cache=True)
def _candidates(tokens, eos, row):
    usable, ends = np.ones(len(tokens)), np.zeros(len(tokens), np.bool_)
    for j in range(len(tokens)):  # rows are short, and np.argsort takes seconds to compile
        for i in range(j - j % row, j):
            if tokens[i] == tokens[j]:
                usable[j] = 0.0
                break
    for end in eos:
        for j in range(len(tokens)):
            ends[j] |= tokens[j] == end
    return usable, ends


@njit(cache=True)
def _grow_batch(probs, factors, scales, usable, ends, num_nodes, max_depth, min_probability, is_chain):
    """`_grow` for each draft: places, parents and probabilities (A, M), and the numbers of nodes (A,)."""
    num_drafts = len(probs)
    places, parents = np.zeros((num_drafts, num_nodes), np.int64), np.zeros((num_drafts, num_nodes), np.int64)
    path_probs, sizes = np.zeros((num_drafts, num_nodes)), np.zeros(num_drafts, np.int64)
    for draft in range(num_drafts):
        given = probs[draft], factors[draft], scales[draft], usable[draft], ends[draft]
        own_places, own_parents, own_probs = _grow(*given, num_nodes, max_depth, min_probability, is_chain)
        size = len(own_places)
        places[draft, :size], parents[draft, :size], path_probs[draft, :size] = own_places, own_parents, own_probs
        sizes[draft] = size
    return places, parents, path_probs, sizes


@njit(cache=True)
def _grow(probs, factors, scales, usable, ends, num_nodes, max_depth, min_probability, is_chain):
    """Places in the rows of candidates, parents and path probabilities of the nodes.

    The per-node arrays have one row more than there are nodes: row 0 is the root, row 1 + i is node i.
    """
    num_tables, num_depths, num_candidates = probs.shape
    num_biases = len(factors)
    num_rows = len(usable)  # of candidates: one per depth, or one for all
    deepest = min(max_depth, num_depths)
    places, parents = np.empty(num_nodes, np.int64), np.empty(num_nodes, np.int64)
    path_probs, depths = np.ones(num_nodes + 1), np.zeros(num_nodes + 1, np.int64)
    scores = np.empty((num_nodes + 1, num_candidates))  # of children not yet taken; 0 once taken
    best, best_score = np.zeros(num_nodes + 1, np.int64), np.zeros(num_nodes + 1)
    num_taken, newest, table, bias = 0, 0, num_tables - 1, num_biases - 1
    while True:
        # Score the children of the newest node. A node whose children are never scored keeps a best score of 0 and is
        # never extended.
        depth = depths[newest]
        if num_candidates > 0 and depth < deepest and (newest == 0 or not ends[places[newest - 1]]):
            row = depth if num_rows > 1 else 0
            for j in range(num_candidates):
                score = path_probs[newest] * scales[bias, depth] * probs[table, depth, j] * factors[bias, j]
                score *= usable[row, j]
                scores[newest, j] = min(score, path_probs[newest])  # rounding must not lift a child above its parent
            best[newest] = np.argmax(scores[newest])
            best_score[newest] = scores[newest, best[newest]]
        if num_taken == num_nodes:
            break
        # Take the most probable child of any node; in a chain, of the newest node only.
        parent = newest if is_chain else np.argmax(best_score[: num_taken + 1])
        score = best_score[parent]
        if not score > 0.0 or score < min_probability:
            break
        child = best[parent]
        row = depths[parent] if num_rows > 1 else 0
        places[num_taken], parents[num_taken] = row * num_candidates + child, parent - 1
        scores[parent, child] = 0.0
        best[parent] = np.argmax(scores[parent])
        best_score[parent] = scores[parent, best[parent]]
        num_taken += 1
        newest, table, bias = num_taken, min(child, num_tables - 1), min(child, num_biases - 1)
        path_probs[newest], depths[newest] = score, depths[parent] + 1
    return places[:num_taken], parents[:num_taken], path_probs[1 : num_taken + 1]


def static(accuracies: np.ndarray, num_nodes: int) -> list[RankPath]:
    """The static tree of ``num_nodes`` rank paths with the largest expected number of accepted tokens.

    As in Medusa, section 2.3.3, the heads are taken to be right independently of each other. A node is then accepted
    with the product of the accuracies along its path, and the sum over the nodes is the expected number of accepted
    tokens.

    Args:
        accuracies: (K, k) how often the token of each rank is right, for each head.
        num_nodes: Node budget M.

    Returns:
        The paths, most probable first and thus parents before children. Paths that are never right are left out.

    Raises:
        ValueError: The accuracies are not a table of probabilities by head and rank.
    """
    table = np.asarray(accuracies, dtype=float)
    if table.ndim != 2 or not ((table >= 0) & (table <= 1)).all():
        raise ValueError("accuracies must be probabilities between 0 and 1, one row per head, one column per rank")
    first = table[0] if len(table) else ()
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


def fill(paths: Sequence[RankPath], tokens: np.ndarray) -> DraftTree:
    """Fill a static tree with each head's most probable tokens.

    Args:
        paths: Rank paths, parents before children, as `static` returns them.
        tokens: (K, k) ids, each head's most probable first; distinct within a head.

    Raises:
        ValueError: A path does not fit the tokens, or comes before its parent.
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
