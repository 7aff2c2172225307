"""Draft trees of the most probable nodes: of frames, of tokens that a function names, and of a copied passage.

Frames without a blank show one token each; frames with a blank are CTC frames, which collapse to a text.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numba import njit

from drafters.tree import ROOT, DraftTree, Growth


class Bias(NamedTuple):
    """Distributions after each of C candidates, in factors: p_t(v | l) = p_t(v) * factors[l, v] * scales[l, t].

    Together they are far smaller than a table (C + 1, T, C). Row l holds after candidate l, row C after the root.
    """

    factors: np.ndarray  # (A, C + 1, C), or (A, C + 1, C + 1) with the blank last: exp B[l, v] up to a constant of l
    scales: np.ndarray  # (A, C + 1, T) what makes the distributions sum to one over the vocabulary


class Candidates(NamedTuple):
    """The tokens that may enter each of A draft trees, with their probabilities, on the host."""

    tokens: np.ndarray  # (A, C) token ids, distinct in each row, or (A, T, C) if each frame has its own
    probs: np.ndarray  # (A, T, C) probability of each candidate in each frame, without the bias; float32 or float64
    blank: np.ndarray | None = None  # (A, T) probability of the blank; None if frames have none
    bias: Bias | None = None  # what the token before makes of the probabilities


class SearchLimits(NamedTuple):
    """What a search may take."""

    num_nodes: int  # M, largest number of nodes
    max_depth: int  # largest depth of a node
    eos: Collection[int] = ()  # end-of-sequence tokens; nothing is drafted below them
    min_probability: float = 0.0  # nodes whose path is less probable are left out
    is_chain: bool = False  # take a single path: below each node only its most probable child


def search(candidates: Candidates, limits: SearchLimits) -> list[DraftTree]:
    """The trees whose nodes are the ``num_nodes`` most probable texts below each of A roots.

    The probability of a node is that of all drafts that begin with its path: without a blank the product over its
    tokens, with one the sum over all alignments (`drafters.ctc.reference`). A node is at most as probable as its
    parent, so the most probable nodes form a tree, and repeatedly taking the most probable child of any node taken
    before finds exactly them (EAGLE-2, section 4; DDTree).

    The nodes come with their probabilities, most probable first and thus parents before children. Among equally
    probable nodes the one whose parent came first is first, then that of the earlier candidate.
    """
    tokens, probs, blank, bias = candidates
    num_drafts, num_frames, num_candidates = probs.shape
    rows = np.ascontiguousarray(tokens if tokens.ndim == 3 else tokens[:, None], dtype=np.int64)
    assert rows.shape in ((num_drafts, num_frames, num_candidates), (num_drafts, 1, num_candidates)), (
        "one row of candidates for each frame, or one for all"
    )
    is_ctc = blank is not None
    if blank is None:
        blank = np.zeros((num_drafts, 0), probs.dtype)
    if bias is None:
        bias = Bias(
            np.ones((num_drafts, 1, num_candidates + 1), probs.dtype), np.ones((num_drafts, 1, num_frames), probs.dtype)
        )
    numbers = [np.ascontiguousarray(array, dtype=probs.dtype) for array in (probs, blank, *bias)]
    eos = np.fromiter(limits.eos, np.int64, len(limits.eos))
    sizes = max(limits.num_nodes, 0), int(limits.max_depth), float(limits.min_probability)
    arguments = [*numbers, rows, eos, *sizes, limits.is_chain, is_ctc]
    drafts = zip(*(array.tolist() for array in _search(*arguments)), strict=True)
    return [DraftTree(ids[:size], parents[:size], probabilities=path[:size]) for ids, parents, path, size in drafts]


@njit(cache=True)
def _search(probs, blank, factors, scales, rows, eos, num_nodes, max_depth, min_probability, is_chain, is_ctc):
    """Tokens, parents and probabilities (A, M) of the nodes of each draft, and the numbers of nodes (A,)."""
    num_drafts, num_frames, num_candidates = probs.shape
    num_rows, root = rows.shape[1], factors.shape[1] - 1  # the root's row of the bias, or the only row without a bias
    tokens, parents = np.zeros((num_drafts, num_nodes), np.int64), np.zeros((num_drafts, num_nodes), np.int64)
    path_probs, sizes = np.zeros((num_drafts, num_nodes)), np.zeros(num_drafts, np.int64)
    for draft in range(num_drafts):
        p, frame_factors, frame_scales = probs[draft], factors[draft], scales[draft]
        ends = np.zeros(rows[draft].shape, np.bool_)
        for end in eos:
            ends |= rows[draft] == end
        # These have one row more than there are nodes: row 0 is the root, row 1 + i is node i.
        chosen, ended = np.zeros(num_nodes + 1, np.int64), np.zeros(num_nodes + 1, np.bool_)
        above, depths = np.zeros(num_nodes + 1, np.int64), np.zeros(num_nodes + 1, np.int64)
        reached = np.ones(num_nodes + 1)  # probability of a node's path
        scores = np.zeros((num_nodes + 1, num_candidates))  # of children not yet taken; 0 once taken
        best, best_score = np.zeros(num_nodes + 1, np.int64), np.zeros(num_nodes + 1)
        blank_end = np.zeros((num_nodes + 1, num_frames + 1))  # b_t of each node, t = 0..T, of CTC frames
        label_end = np.zeros((num_nodes + 1, num_frames + 1))  # n_t
        blank_end[0, 0] = 1.0
        size, newest = 0, 0
        while True:
            # Score all children of the newest node. Only now are its b_t and n_t needed: nodes that are scored but
            # never taken cost nothing. A node without scores, at the largest depth or after an end-of-sequence token,
            # keeps a best score of 0 and is never extended.
            depth, last = depths[newest], chosen[newest]
            if num_candidates > 0 and depth < min(max_depth, num_frames) and not ended[newest]:
                bias = min(last, root) if newest > 0 else root
                if is_ctc:
                    frames = p, blank[draft], frame_factors, frame_scales
                    _spell(newest, above, chosen, frames, blank_end, label_end)
                    # A child's prefix probability sums over the frame in which it is first emitted.
                    repeat_score = 0.0
                    for t in range(num_frames):
                        source = (blank_end[newest, t] + label_end[newest, t]) * frame_scales[bias, t]
                        if source > 0.0:
                            for j in range(num_candidates):
                                scores[newest, j] += source * p[t, j]
                        if newest > 0:
                            repeat_score += blank_end[newest, t] * frame_scales[bias, t] * p[t, last]
                    if newest > 0:
                        scores[newest, last] = repeat_score
                    for j in range(num_candidates):
                        scores[newest, j] *= frame_factors[bias, j]
                else:
                    path = reached[newest] * frame_scales[bias, depth]
                    for j in range(num_candidates):
                        scores[newest, j] = path * p[depth, j] * frame_factors[bias, j]
                for j in range(num_candidates):  # rounding must not lift a child above its parent
                    scores[newest, j] = min(scores[newest, j], reached[newest])
                best[newest] = np.argmax(scores[newest])
                best_score[newest] = scores[newest, best[newest]]
            if size == num_nodes:
                break
            # Take the most probable child of any node; in a chain, of the newest node only. No node that is still to
            # be found can be more probable: it would be below one of these children.
            parent = newest if is_chain else np.argmax(best_score[: size + 1])
            score, child, row = best_score[parent], best[parent], min(depths[parent], num_rows - 1)
            if not score > 0.0 or score < min_probability:
                break
            tokens[draft, size], parents[draft, size] = rows[draft, row, child], parent - 1
            path_probs[draft, size] = score
            scores[parent, child] = 0.0
            best[parent] = np.argmax(scores[parent])
            best_score[parent] = scores[parent, best[parent]]
            size += 1
            newest = size
            chosen[newest], ended[newest], above[newest] = child, ends[row, child], parent
            depths[newest], reached[newest] = depths[parent] + 1, score
        sizes[draft] = size
    return tokens, parents, path_probs, sizes


@njit(cache=True)
def _spell(node, above, chosen, frames, blank_end, label_end):
    """Write b_t and n_t of a node, by the recursion of `drafters.ctc.reference`."""
    probs, blank, factors, scales = frames
    parent, last, root = above[node], chosen[node], len(factors) - 1
    bias = min(last, root) if node > 0 else root
    bias_above = min(chosen[parent], root) if parent > 0 else root
    repeats = parent > 0 and chosen[parent] == last  # a repetition of the token above has to enter from a blank
    for t in range(len(probs)):
        none = blank[t] * factors[bias, -1] * scales[bias, t]
        if node > 0:
            source = blank_end[parent, t] + (0.0 if repeats else label_end[parent, t])
            enter = source * probs[t, last] * factors[bias_above, last] * scales[bias_above, t]
            stay = probs[t, last] * factors[bias, last] * scales[bias, t]
            label_end[node, t + 1] = label_end[node, t] * stay + enter
        blank_end[node, t + 1] = (blank_end[node, t] + label_end[node, t]) * none


# ---- trees of Python functions, node by node


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


# ---- trees of a drafter that may copy


def with_passage(tree: DraftTree, passage: Sequence[float], share: float, limits: SearchLimits) -> DraftTree:
    """The most probable nodes if the draft is the passage with probability ``share``, and otherwise as in the tree.

    The probability of a path is (1 - share) times that in the tree, plus the share if the passage begins with it. So a
    path that the tree lacks has the share alone, although the drafter may also write it without copying. Of a
    single path, a ``chain``, the one with more expected tokens is taken: the tree's own or the passage.
    """
    if not (share and tree.probabilities):
        return tree
    grown, probs = Growth(), [(1 - share) * probability for probability in tree.probabilities]
    for parent, token in zip(tree.parents, tree.tokens, strict=True):
        grown.child(parent, token)
    node, path = ROOT, list[int]()
    for token in map(int, passage[: limits.max_depth]):
        node = grown.child(node, token)
        path.append(node)
        probs += [0.0] * (len(grown.tokens) - len(probs))
        probs[node] += share
        if token in limits.eos:
            break
    kept = sorted(range(len(probs)), key=lambda node: -probs[node])  # parents stay before their children
    if limits.is_chain:
        kept = max([*range(len(tree))], path, key=lambda nodes: sum(probs[node] for node in nodes))
    kept = [node for node in kept if probs[node] >= limits.min_probability][: limits.num_nodes]
    place = {ROOT: ROOT} | {node: index for index, node in enumerate(kept)}
    tokens, parents = [grown.tokens[node] for node in kept], [place[grown.parents[node]] for node in kept]
    return DraftTree(tokens, parents, probabilities=[probs[node] for node in kept])
