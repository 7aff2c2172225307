"""The CTC paper's own tree, for the ablation: the most probable frame sequences first, the CTC transform after."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numba import njit

from drafters.tree import DraftTree

DROPPED = -2  # a frame sequence whose text goes too deep, or on after an end-of-sequence token


def search(
    probs: np.ndarray,
    blank: np.ndarray,
    tokens: np.ndarray,
    num_nodes: int,
    max_depth: int,
    eos: Collection[int] = (),
) -> tuple[DraftTree, np.ndarray]:
    """The texts of the ``num_nodes`` most probable frame sequences (CTC-drafter, section 3.3).

    A frame sequence picks one of its tokens, or the blank, in each of the frames 1..t, and is as probable as the
    product of what it picks; the most probable ones, of any length t, are a tree over frames. The transform then
    merges repeats and drops blanks on every path, and paths that spell one text become one. Unlike the original
    code's, the result is a tree of texts: no blank and no duplicate is fed, and a node's depth is its place in the
    text. What the transform merges is budget lost, so mostly fewer nodes are fed than asked for.

    Args:
        probs: (T, k) p_t of each frame's own most probable tokens.
        blank: (T,) p_t of the blank.
        tokens: (T, k) their ids, distinct within a frame.
        num_nodes: Frame sequences M.
        max_depth: Deepest node.
        eos: Tokens below which nothing is drafted.

    Returns:
        The tree, parents before children, and for each node the probability of the likeliest frame sequence that
        spells it: not the node's own, which is a sum over frame sequences.
    """
    assert probs.shape == tokens.shape and len(probs) == len(blank), "probs, blank and tokens belong together"
    choices = np.column_stack([probs, blank]).astype(np.float64)  # (T, k + 1), the blank last
    ids = np.ascontiguousarray(tokens, dtype=np.int64)
    ends = np.fromiter(eos, np.int64, len(eos))
    texts, parents, reached = _grow(choices, ids, max(num_nodes, 0), int(max_depth), ends)
    return DraftTree(texts.tolist(), parents.tolist()), reached


@njit(cache=True)
def _grow(choices, tokens, num_nodes, max_depth, ends):
    """Tokens, parents and probabilities of the draft tree. Group 0 is the root, group 1 + i is frame node i."""
    num_frames, num_choices = choices.shape
    ranks = np.empty((num_frames, num_choices), np.int64)
    for t in range(num_frames):
        ranks[t] = np.argsort(-choices[t], kind="mergesort")
    reached, frames = np.ones(num_nodes + 1), np.zeros(num_nodes + 1, np.int64)
    next_rank = np.zeros(num_nodes + 1, np.int64)
    best_score = np.zeros(num_nodes + 1)  # of the likeliest child not yet taken
    spelled = np.full(num_nodes + 1, -1)  # node of the draft tree that a frame node's text ends in, or DROPPED
    emitting = np.full(num_nodes + 1, -1)  # its frame's token, -1 for a blank

    texts, parents, likeliest = np.empty(num_nodes, np.int64), np.empty(num_nodes, np.int64), np.empty(num_nodes)
    depths = np.empty(num_nodes, np.int64)
    num_texts, num_found = 0, 0
    if num_frames > 0:
        best_score[0] = choices[0, ranks[0, 0]]
    while num_found < num_nodes:
        group = np.argmax(best_score[: num_found + 1])
        score = best_score[group]
        if not score > 0.0:
            break
        frame = frames[group]
        choice = ranks[frame, next_rank[group]]
        next_rank[group] += 1
        best_score[group] = 0.0
        if next_rank[group] < num_choices:
            best_score[group] = reached[group] * choices[frame, ranks[frame, next_rank[group]]]
        num_found += 1
        reached[num_found], frames[num_found] = score, frame + 1
        if frame + 1 < num_frames:
            best_score[num_found] = score * choices[frame + 1, ranks[frame + 1, 0]]

        text = spelled[group]  # the transform: a blank or a repeat adds nothing to the text
        if choice < num_choices - 1:
            emitting[num_found] = tokens[frame, choice]
            if emitting[num_found] != emitting[group] and text != DROPPED:
                text = _below(text, emitting[num_found], texts, parents, depths, num_texts, max_depth, ends)
                if text == num_texts:
                    likeliest[text] = score
                    num_texts += 1
        spelled[num_found] = text
    return texts[:num_texts], parents[:num_texts], likeliest[:num_texts]


@njit(cache=True)
def _below(parent, token, texts, parents, depths, num_texts, max_depth, ends):
    """The node of ``token`` below ``parent``: an old one, a new one written at ``num_texts``, or DROPPED."""
    for node in range(parent + 1, num_texts):
        if parents[node] == parent and texts[node] == token:
            return node
    depth = 1
    if parent >= 0:
        depth = depths[parent] + 1
        for end in ends:
            if texts[parent] == end:
                return DROPPED
    if depth > max_depth:
        return DROPPED
    texts[num_texts], parents[num_texts], depths[num_texts] = token, parent, depth
    return num_texts
