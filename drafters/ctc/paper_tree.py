"""The CTC paper's own draft tree, for comparison: the most probable frame sequences, collapsed afterwards."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numba import njit

from drafters.tree import DraftTree

DROPPED = -2  # a frame sequence whose text is too deep, or continues after an end-of-sequence token


def search(
    probs: np.ndarray,
    blank: np.ndarray,
    tokens: np.ndarray,
    num_nodes: int,
    max_depth: int,
    eos: Collection[int] = (),
) -> tuple[DraftTree, np.ndarray]:
    """The texts of the ``num_nodes`` most probable frame sequences (CTC-drafter, section 3.3).

    A frame sequence of length t chooses a token or the blank in each of the frames 1..t; its probability is the product
    of its choices. The most probable sequences, of any length, form a tree over frames. Each path is then collapsed,
    and paths with the same text are merged. Unlike in the original code the result is a tree of texts: neither blanks
    nor duplicates are fed, and a node's depth is its position in the text. Merged paths waste node budget, so usually
    fewer than ``num_nodes`` nodes are fed.

    Args:
        probs: (T, k) p_t of each frame's most probable tokens.
        blank: (T,) p_t of the blank.
        tokens: (T, k) ids of these tokens, distinct within a frame.
        num_nodes: Number of frame sequences M.
        max_depth: Largest depth of a node.
        eos: End-of-sequence tokens; nothing is drafted below them.

    Returns:
        The tree, parents before children, and for each node the probability of the most probable frame sequence that
        spells it. The node's own probability is a sum over frame sequences.
    """
    assert probs.shape == tokens.shape and len(probs) == len(blank), "probs, blank and tokens belong together"
    choices = np.column_stack([probs, blank]).astype(np.float64)  # (T, k + 1), the blank last
    ids = np.ascontiguousarray(tokens, dtype=np.int64)
    ends = np.fromiter(eos, np.int64, len(eos))
    ranks = np.argsort(-choices, axis=1, kind="stable")  # out here: it takes seconds to compile
    texts, parents, path_probs = _grow(choices, ranks, ids, max(num_nodes, 0), int(max_depth), ends)
    return DraftTree(texts.tolist(), parents.tolist()), path_probs


@njit(cache=True)
def _grow(choices, ranks, tokens, num_nodes, max_depth, ends):
    """Tokens, parents and probabilities of the draft tree.

    Two trees grow together: frame nodes, each a choice in one frame (row 0 is the root, row 1 + i is frame node i), and
    text nodes, which are the result.
    """
    num_frames, num_choices = choices.shape
    path_probs, frames = np.ones(num_nodes + 1), np.zeros(num_nodes + 1, np.int64)
    next_rank = np.zeros(num_nodes + 1, np.int64)
    best_score = np.zeros(num_nodes + 1)  # of the most probable child not yet taken
    text_node = np.full(num_nodes + 1, -1)  # text node in which a frame node's text ends, or DROPPED
    emitted = np.full(num_nodes + 1, -1)  # token of a frame node, -1 for a blank

    texts, parents, text_probs = np.empty(num_nodes, np.int64), np.empty(num_nodes, np.int64), np.empty(num_nodes)
    depths = np.empty(num_nodes, np.int64)
    num_texts, num_taken = 0, 0
    if num_frames > 0:
        best_score[0] = choices[0, ranks[0, 0]]
    while num_taken < num_nodes:
        # Take the most probable child of any frame node, and queue its next sibling and its first child.
        parent = np.argmax(best_score[: num_taken + 1])
        score = best_score[parent]
        if not score > 0.0:
            break
        frame = frames[parent]
        choice = ranks[frame, next_rank[parent]]
        next_rank[parent] += 1
        best_score[parent] = 0.0
        if next_rank[parent] < num_choices:
            best_score[parent] = path_probs[parent] * choices[frame, ranks[frame, next_rank[parent]]]
        num_taken += 1
        path_probs[num_taken], frames[num_taken] = score, frame + 1
        if frame + 1 < num_frames:
            best_score[num_taken] = score * choices[frame + 1, ranks[frame + 1, 0]]

        # Collapse: a blank or a repetition of the parent's token adds nothing to the text.
        text = text_node[parent]
        if choice < num_choices - 1:
            emitted[num_taken] = tokens[frame, choice]
            if emitted[num_taken] != emitted[parent] and text != DROPPED:
                text = _child(text, emitted[num_taken], texts, parents, depths, num_texts, max_depth, ends)
                if text == num_texts:
                    text_probs[text] = score
                    num_texts += 1
        text_node[num_taken] = text
    return texts[:num_texts], parents[:num_texts], text_probs[:num_texts]


@njit(cache=True)
def _child(parent, token, texts, parents, depths, num_texts, max_depth, ends):
    """The text node of ``token`` below ``parent``: an existing one, a new one written at ``num_texts``, or DROPPED."""
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
