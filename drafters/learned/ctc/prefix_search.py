"""CTC prefix search: the most probable collapsed prefixes of T frames are the draft tree."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numba import njit

from drafters.learned.trees.best_first import candidates
from drafters.tree import DraftTree


def search(
    probs: np.ndarray,
    blank: np.ndarray,
    tokens: np.ndarray,
    num_nodes: int,
    max_depth: int,
    eos: Collection[int] = (),
    min_probability: float = 0.0,
) -> tuple[DraftTree, np.ndarray]:
    """The ``num_nodes`` most probable prefixes, as a tree whose every node is one of them.

    A prefix is at most as probable as the one above it, so the most probable prefixes are a tree, and taking again
    and again the best child of any prefix taken before finds exactly them. With p_t(. | l) the law of frame t while
    l is the last token emitted, and b_t(g), n_t(g) the probability that frames 1..t collapse to g and end in blank or
    in g's last token:

        enter_t(g.c) = p_t(c | last(g)) * [b_{t-1}(g) + (c != last(g)) * n_{t-1}(g)]
        n_t(g.c)     = n_{t-1}(g.c) * p_t(c | c) + enter_t(g.c)
        b_t(g)       = (b_{t-1}(g) + n_{t-1}(g)) * p_t(blank | last(g))
        P(text begins with g.c) = sum_t enter_t(g.c)

    Where the law does not depend on l, this is the recursion of `alignment.prefix_log_probs` (Graves 2006, section
    4.1). Where it does, a frame's law is still normalised given what was emitted, so the alignments sum to one.

    Args:
        probs: (L, T, C), or (T, C) for L = 1: p_t of each candidate token, float32 or float64. L is 1 where the law
            does not depend on the last token emitted, else C + 1: row l is p_t(. | candidate l), row C the law while
            nothing is emitted yet.
        blank: (L, T), or (T,): p_t of the blank.
        tokens: (C,) ids of the candidates; of a token that stands more than once the first place counts.
        num_nodes: Node budget M.
        max_depth: Deepest node.
        eos: Tokens below which nothing is drafted.
        min_probability: Prefixes less probable than this are not fed.

    Returns:
        The tree, most probable node first, so parents before children, and the (M,) prefix probabilities of its
        nodes. Of equally probable nodes the one whose parent came first is first, then that of the earlier candidate.
    """
    return _tree(probs, blank, tokens, num_nodes, max_depth, eos, min_probability, False)


def chain(
    probs: np.ndarray,
    blank: np.ndarray,
    tokens: np.ndarray,
    num_nodes: int,
    max_depth: int,
    eos: Collection[int] = (),
    min_probability: float = 0.0,
) -> tuple[DraftTree, np.ndarray]:
    """As `search`, but one path: below each prefix its most probable child alone."""
    return _tree(probs, blank, tokens, num_nodes, max_depth, eos, min_probability, True)


def _tree(probs, blank, tokens, num_nodes, max_depth, eos, min_probability, is_chain) -> tuple[DraftTree, np.ndarray]:
    probs = np.ascontiguousarray(probs if probs.ndim == 3 else probs[None])
    blank = np.ascontiguousarray(blank if blank.ndim == 2 else blank[None], dtype=probs.dtype)
    num_candidates = probs.shape[2]
    assert len(probs) in (1, num_candidates + 1), "one law for all, or one after each candidate and one after the root"
    assert blank.shape == probs.shape[:2] and len(tokens) == num_candidates, "probs, blank and tokens belong together"
    tokens = np.ascontiguousarray(tokens, dtype=np.int64)
    usable, ends = candidates(tokens, eos)
    limits = max(num_nodes, 0), int(max_depth), float(min_probability)  # another type would compile anew
    chosen, parents, reached = _grow(probs, blank, usable, ends, *limits, is_chain)
    return DraftTree(tokens[chosen].tolist(), parents.tolist()), reached


@njit(cache=True)
def _grow(probs, blank, usable, ends, num_nodes, max_depth, min_probability, is_chain):
    """Candidates, parents and probabilities of the nodes. Group 0 is the root, group 1 + i is node i."""
    num_distributions, num_frames, num_candidates = probs.shape
    chosen, parents = np.empty(num_nodes, np.int64), np.empty(num_nodes, np.int64)
    reached, depths = np.ones(num_nodes + 1), np.zeros(num_nodes + 1, np.int64)
    blank_end = np.zeros((num_nodes + 1, num_frames + 1))  # b_t of each group, t = 0..T
    label_end = np.zeros((num_nodes + 1, num_frames + 1))  # n_t
    scores = np.zeros((num_nodes + 1, num_candidates))  # of children not yet taken; 0 where taken
    best, best_score = np.zeros(num_nodes + 1, np.int64), np.zeros(num_nodes + 1)
    blank_end[0, 0] = 1.0
    num_found, opened, distribution, last = (
        0,
        0,
        num_distributions - 1,
        -1,
    )  # the newest group, its law, and its last token
    while True:
        if num_candidates > 0 and depths[opened] < max_depth and (last < 0 or not ends[last]):
            if last >= 0:
                above = parents[opened - 1] + 1
                repeats = above > 0 and chosen[above - 1] == last
                distribution_above = (
                    0 if num_distributions == 1 else (chosen[above - 1] if above > 0 else num_candidates)
                )
                for t in range(num_frames):
                    source = blank_end[above, t] + (0.0 if repeats else label_end[above, t])
                    enter = probs[distribution_above, t, last] * source
                    label_end[opened, t + 1] = label_end[opened, t] * probs[distribution, t, last] + enter
                    blank_end[opened, t + 1] = (blank_end[opened, t] + label_end[opened, t]) * blank[distribution, t]
            else:
                for t in range(num_frames):
                    blank_end[0, t + 1] = blank_end[0, t] * blank[distribution, t]
            again = 0.0
            for t in range(num_frames):
                source = blank_end[opened, t] + label_end[opened, t]
                if source > 0.0:
                    for j in range(num_candidates):
                        scores[opened, j] += source * probs[distribution, t, j]
                if last >= 0:
                    again += blank_end[opened, t] * probs[distribution, t, last]
            if last >= 0:
                scores[opened, last] = again
            for j in range(num_candidates):  # rounding must not lift a child above its parent
                scores[opened, j] = min(scores[opened, j], reached[opened]) * usable[j]
            best[opened] = np.argmax(scores[opened])
            best_score[opened] = scores[opened, best[opened]]
        if num_found == num_nodes:
            break
        group = opened if is_chain else np.argmax(best_score[: num_found + 1])
        score = best_score[group]
        if not score > 0.0 or score < min_probability:
            break
        last = best[group]
        chosen[num_found], parents[num_found] = last, group - 1
        scores[group, last] = 0.0
        best[group] = np.argmax(scores[group])
        best_score[group] = scores[group, best[group]]
        num_found += 1
        opened, distribution = num_found, last if num_distributions > 1 else 0
        reached[opened], depths[opened] = score, depths[group] + 1
    return chosen[:num_found], parents[:num_found], reached[1 : num_found + 1]
