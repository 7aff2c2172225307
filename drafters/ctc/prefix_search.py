"""CTC prefix search: the most probable collapsed prefixes of T frames are the draft tree."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numba import njit

from drafters.tree import DraftTree
from drafters.trees.best_first import Bias, SearchLimits, as_trees, candidates, no_bias


def search(
    probs: np.ndarray,
    blank: np.ndarray,
    tokens: np.ndarray,
    num_nodes: int,
    max_depth: int,
    eos: Collection[int] = (),
    min_probability: float = 0.0,
    bias: Bias | None = None,
    merge_repeats: bool = True,
) -> tuple[DraftTree, np.ndarray]:
    """The tree whose nodes are the ``num_nodes`` most probable prefixes.

    A prefix is at most as probable as its parent, so the most probable prefixes form a tree, and repeatedly taking the
    most probable child of any prefix taken before finds exactly them. p_t(. | l) is the distribution of frame t while l
    is the last emitted token, and b_t(g), n_t(g) are the probabilities that frames 1..t collapse to g and end in a
    blank or in g's last token:

        enter_t(g.c) = p_t(c | last(g)) * [b_{t-1}(g) + (c != last(g)) * n_{t-1}(g)]
        n_t(g.c)     = n_{t-1}(g.c) * p_t(c | c) + enter_t(g.c)
        b_t(g)       = (b_{t-1}(g) + n_{t-1}(g)) * p_t(blank | last(g))
        P(text begins with g.c) = sum_t enter_t(g.c)

    If equal neighbours are not merged, every token can enter from n and none stays: n_t(g.c) = enter_t(g.c).

    If the distribution does not depend on l, this is the recursion of `alignment.prefix_log_probs` (Graves 2006,
    section 4.1). If it does, a frame is still normalised given what was emitted, so the alignments sum to one.

    Args:
        probs: (L, T, C), or (T, C) for L = 1: p_t of each candidate token, float32 or float64. L is 1 if the
            distribution does not depend on the last emitted token, else C + 1: row l is p_t(. | candidate l), row C the
            distribution while nothing is emitted.
        blank: (L, T), or (T,): p_t of the blank.
        tokens: (C,) ids of the candidates; if a token occurs more than once, its first occurrence counts.
        num_nodes: Node budget M.
        max_depth: Largest depth of a node.
        eos: End-of-sequence tokens; nothing is drafted below them.
        min_probability: Prefixes less probable than this are left out.
        bias: The distributions after each candidate in factors, if ``probs`` has a single row; the last column of its
            factors is the blank's.
        merge_repeats: As in `alignment.collapse`.

    Returns:
        The tree, most probable node first and thus parents before children, and the (M,) prefix probabilities of its
        nodes. Among equally probable nodes the one whose parent came first is first, then that of the earlier
        candidate.
    """
    return _single(probs, blank, tokens, SearchLimits(num_nodes, max_depth, eos, min_probability), bias, merge_repeats)


def chain(
    probs: np.ndarray,
    blank: np.ndarray,
    tokens: np.ndarray,
    num_nodes: int,
    max_depth: int,
    eos: Collection[int] = (),
    min_probability: float = 0.0,
    bias: Bias | None = None,
    merge_repeats: bool = True,
) -> tuple[DraftTree, np.ndarray]:
    """As `search`, but a single path: below each prefix only its most probable child."""
    return _single(
        probs, blank, tokens, SearchLimits(num_nodes, max_depth, eos, min_probability, True), bias, merge_repeats
    )


def _single(probs, blank, tokens, limits, bias, merge_repeats) -> tuple[DraftTree, np.ndarray]:
    assert probs.ndim - 1 == blank.ndim, "probs and blank belong together"
    bias = bias and Bias(*(part[None] for part in bias))
    return search_batch(probs[None], blank[None], tokens[None], limits, bias, merge_repeats)[0]


def search_batch(
    probs: np.ndarray,
    blank: np.ndarray,
    tokens: np.ndarray,
    limits: SearchLimits,
    bias: Bias | None = None,
    merge_repeats: bool = True,
) -> list[tuple[DraftTree, np.ndarray]]:
    """What `search`, or `chain`, finds for each of A drafts, in a single call of the compiled search.

    Args:
        probs: (A, L, T, C), or (A, T, C) for L = 1.
        blank: (A, L, T), or (A, T).
        tokens: (A, C) ids of the candidates.
        limits: What each of the searches may take.
        bias: Factors of A drafts, if ``probs`` has a single row for each.
        merge_repeats: As in `alignment.collapse`.
    """
    probs = np.ascontiguousarray(probs if probs.ndim == 4 else probs[:, None])
    blank = np.ascontiguousarray(blank if blank.ndim == 3 else blank[:, None], dtype=probs.dtype)
    num_drafts, num_tables, _, num_candidates = probs.shape
    assert num_tables in (1, num_candidates + 1), (
        "one distribution for all, or one after each candidate and one after the root"
    )
    assert blank.shape == probs.shape[:3] and tokens.shape == (num_drafts, num_candidates), (
        "probs, blank and tokens belong together"
    )
    tokens = np.ascontiguousarray(tokens, dtype=np.int64)
    usable, ends = (part.reshape(tokens.shape) for part in candidates(tokens.ravel(), limits.eos, num_candidates))
    factors, scales = bias or no_bias(probs, num_candidates + 1)
    return as_trees(tokens, *_grow_batch(probs, blank, factors, scales, usable, ends, *limits.sizes(), merge_repeats))


@njit(cache=True)
def _grow_batch(probs, blank, factors, scales, usable, ends, num_nodes, max_depth, min_probability, is_chain, merges):
    """`_grow` for each draft: candidates, parents and probabilities (A, M), and the numbers of nodes (A,)."""
    num_drafts = len(probs)
    chosen, parents = np.zeros((num_drafts, num_nodes), np.int64), np.zeros((num_drafts, num_nodes), np.int64)
    prefix_probs, sizes = np.zeros((num_drafts, num_nodes)), np.zeros(num_drafts, np.int64)
    for draft in range(num_drafts):
        given = probs[draft], blank[draft], factors[draft], scales[draft], usable[draft], ends[draft]
        own_chosen, own_parents, own_probs = _grow(*given, num_nodes, max_depth, min_probability, is_chain, merges)
        size = len(own_chosen)
        chosen[draft, :size], parents[draft, :size], prefix_probs[draft, :size] = own_chosen, own_parents, own_probs
        sizes[draft] = size
    return chosen, parents, prefix_probs, sizes


@njit(cache=True)
def _grow(probs, blank, factors, scales, usable, ends, num_nodes, max_depth, min_probability, is_chain, merges):
    """Candidates, parents and probabilities of the nodes.

    The per-node arrays have one row more than there are nodes: row 0 is the root, row 1 + i is node i.
    """
    num_tables, num_frames, num_candidates = probs.shape
    num_biases = len(factors)
    chosen, parents = np.empty(num_nodes, np.int64), np.empty(num_nodes, np.int64)
    prefix_probs, depths = np.ones(num_nodes + 1), np.zeros(num_nodes + 1, np.int64)
    blank_end = np.zeros((num_nodes + 1, num_frames + 1))  # b_t of each node, t = 0..T
    label_end = np.zeros((num_nodes + 1, num_frames + 1))  # n_t
    scores = np.zeros((num_nodes + 1, num_candidates))  # of children not yet taken; 0 once taken
    best, best_score = np.zeros(num_nodes + 1, np.int64), np.zeros(num_nodes + 1)
    blank_end[0, 0] = 1.0
    # The newest node, its last token (-1 at the root), and the rows of probs and of the bias after that token.
    num_taken, newest, token, row, bias = 0, 0, -1, num_tables - 1, num_biases - 1
    while True:
        # Score all children of the newest node. Only now are its b_t and n_t needed: nodes that are scored but never
        # taken cost nothing. A node without scores, at the largest depth or after an end-of-sequence token, keeps a
        # best score of 0 and is never extended.
        if num_candidates > 0 and depths[newest] < max_depth and (token < 0 or not ends[token]):
            if token >= 0:
                above = parents[newest - 1] + 1
                # Where equal neighbours are merged, a repetition of the token above has to enter from a blank.
                repeats = merges and above > 0 and chosen[above - 1] == token
                last_above = chosen[above - 1] if above > 0 else num_candidates
                row_above, bias_above = min(last_above, num_tables - 1), min(last_above, num_biases - 1)
                for t in range(num_frames):
                    source = blank_end[above, t] + (0.0 if repeats else label_end[above, t])
                    enter = source * probs[row_above, t, token] * factors[bias_above, token] * scales[bias_above, t]
                    stay = probs[row, t, token] * factors[bias, token] * scales[bias, t]
                    none = blank[row, t] * factors[bias, num_candidates] * scales[bias, t]
                    label_end[newest, t + 1] = label_end[newest, t] * stay + enter if merges else enter
                    blank_end[newest, t + 1] = (blank_end[newest, t] + label_end[newest, t]) * none
            else:
                for t in range(num_frames):
                    none = blank[row, t] * factors[bias, num_candidates] * scales[bias, t]
                    blank_end[0, t + 1] = blank_end[0, t] * none
            # A child's prefix probability sums over the frame in which it is first emitted.
            repeat_score = 0.0
            for t in range(num_frames):
                source = (blank_end[newest, t] + label_end[newest, t]) * scales[bias, t]
                if source > 0.0:
                    for j in range(num_candidates):
                        scores[newest, j] += source * probs[row, t, j]
                if merges and token >= 0:
                    repeat_score += blank_end[newest, t] * scales[bias, t] * probs[row, t, token]
            if merges and token >= 0:
                scores[newest, token] = repeat_score
            for j in range(num_candidates):  # rounding must not lift a child above its parent
                scores[newest, j] = min(scores[newest, j] * factors[bias, j], prefix_probs[newest]) * usable[j]
            best[newest] = np.argmax(scores[newest])
            best_score[newest] = scores[newest, best[newest]]
        if num_taken == num_nodes:
            break
        # Take the most probable child of any node; in a chain, of the newest node only. No prefix that is still to be
        # found can be more probable: it would be below one of these children.
        parent = newest if is_chain else np.argmax(best_score[: num_taken + 1])
        score = best_score[parent]
        if not score > 0.0 or score < min_probability:
            break
        token = best[parent]
        chosen[num_taken], parents[num_taken] = token, parent - 1
        scores[parent, token] = 0.0
        best[parent] = np.argmax(scores[parent])
        best_score[parent] = scores[parent, best[parent]]
        num_taken += 1
        newest, row, bias = num_taken, min(token, num_tables - 1), min(token, num_biases - 1)
        prefix_probs[newest], depths[newest] = score, depths[parent] + 1
    return chosen[:num_taken], parents[:num_taken], prefix_probs[1 : num_taken + 1]
