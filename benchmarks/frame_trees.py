"""Draft trees of one draft's frames, read as tokens or as CTC frames: what benchmarks/ctc_paper_table2.py compares."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafters import CTC, Block, Medusa
from drafters.learned.ctc import paper_tree, prefix_search
from drafters.learned.trees import best_first
from drafters.learned.trees.candidates import tables
from drafters.protocol import BaseWeights
from drafters.tree import ROOT, DraftTree


@dataclass(frozen=True)
class Frames:
    """The laws of one draft's T frames on the host, for the few tokens that may enter its tree.

    Args:
        probs: (T, C).
        tokens: (T, C) ids, or (C,) where all frames have the same.
        blank: (T,) probability of the blank, where there is one.
        blank_id: V, the blank's place behind the vocabulary.
    """

    probs: np.ndarray
    tokens: np.ndarray
    blank: np.ndarray | None = None
    blank_id: int = -1


@torch.inference_mode()
def frames_at(
    drafter: Medusa | Block | CTC, hidden: Tensor, input_ids: Tensor, anchors: Tensor, base_weights: BaseWeights
) -> list[Frames]:
    """The frames that decoding would see at several anchors of one known text; shapes as for ``draft_at``, anchors at
    least 1."""
    found: list[Frames] = []
    if isinstance(drafter, Medusa):
        states = drafter.encode(hidden[None])[0]
        for part in anchors.split(drafter.chunk_anchors):
            probs, tokens = (each.cpu().numpy() for each in drafter(states[part - 1], base_weights, drafter.top_k))
            found += [Frames(*each) for each in zip(probs, tokens, strict=True)]
        return found
    for part in anchors.split(drafter.chunk_anchors):
        roots = input_ids[part]
        states = drafter(hidden[None], part[None], roots[None], base_weights.embedding)[0]  # (A, T, D)
        logits = drafter.logits(states, base_weights.head)
        for (probs,), tokens in tables(logits, roots, drafter.vocab_size, drafter.num_candidates):
            if isinstance(drafter, CTC):
                found.append(Frames(probs[:, :-1], tokens, probs[:, -1], drafter.vocab_size))
            else:
                found.append(Frames(probs, tokens))
    return found


# ---- one draft, read in different ways: frames, node budget, deepest node, end-of-sequence tokens -> draft tree


def collapsed(tree: DraftTree, blank: int | None = None) -> DraftTree:
    """The CTC transform of a tree over frames: on every path repeats are merged, then blanks dropped; equal texts are
    one path. The root is no frame: the first token may repeat it.

        the ─┬─ the ── cat        becomes        the ─┬─ cat
             └─ ε ──── the                            └─ the
    """
    tokens: list[int] = []
    parents: list[int] = []
    index: dict[tuple[int, int], int] = {}
    spelled = {ROOT: ROOT}  # node that the text of each node's path ends in
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        spelled[node] = spelled[parent]
        if token == blank or (parent != ROOT and token == tree.tokens[parent]):
            continue
        place = spelled[parent], token
        if place not in index:
            index[place] = len(tokens)
            tokens.append(token)
            parents.append(spelled[parent])
        spelled[node] = index[place]
    return DraftTree(tokens, parents)


def plain(frames: Frames, num_nodes: int, max_depth: int, eos: Collection[int] = ()) -> DraftTree:
    """Frame u is token u; best first."""
    return best_first.search(frames.probs, frames.tokens, num_nodes, max_depth, eos)[0]


def transformed(frames: Frames, num_nodes: int, max_depth: int, eos: Collection[int] = ()) -> DraftTree:
    """The CTC transform of `plain`, for frames without a blank."""
    return collapsed(plain(frames, num_nodes, max_depth, eos))


def blanks_kept(frames: Frames, num_nodes: int, max_depth: int, eos: Collection[int] = ()) -> DraftTree:
    """Frame u is token u, and a blank is one of its tokens. As the base never writes one, blanks and what is below
    them are then left out: it is accepted as much as with them."""
    symbols, ids = np.column_stack([frames.probs, frames.blank]), np.append(frames.tokens, frames.blank_id)
    tree = best_first.search(symbols, ids, num_nodes, max_depth, eos)[0]
    paths = map(tree.path_tokens, range(len(tree)))
    return DraftTree.from_paths([path for path in paths if frames.blank_id not in path])


def blanks_dropped(frames: Frames, num_nodes: int, max_depth: int, eos: Collection[int] = ()) -> DraftTree:
    """Frame u is token u, given that it is not the blank."""
    written = np.maximum(1 - frames.blank, np.finfo(frames.blank.dtype).tiny)
    return best_first.search(frames.probs / written[:, None], frames.tokens, num_nodes, max_depth, eos)[0]


def paper(frames: Frames, num_nodes: int, max_depth: int, eos: Collection[int] = ()) -> DraftTree:
    """The CTC transform of the most probable frame sequences, blanks among them (CTC-drafter, section 3.3): of the same
    tree as `blanks_kept`, and the drafter's ``tree: paper`` with no ``top_k`` of its own for each frame."""
    tokens = np.broadcast_to(frames.tokens, frames.probs.shape)
    return paper_tree.search(frames.probs, frames.blank, tokens, num_nodes, max_depth, eos)[0]


def exact(frames: Frames, num_nodes: int, max_depth: int, eos: Collection[int] = ()) -> DraftTree:
    """The most probable texts, each summed over its frame sequences: the drafter's ``tree: prefix``."""
    return prefix_search.search(frames.probs, frames.blank, frames.tokens, num_nodes, max_depth, eos)[0]


Build = Callable[[Frames, int, int, Collection[int]], DraftTree]
CROSS_ENTROPY: dict[str, Build] = {"plain": plain, "CTC": transformed}
WAYS: dict[str, dict[str, Build]] = {
    "Medusa": CROSS_ENTROPY,
    "Block": CROSS_ENTROPY,
    "CTC": {"plain, blanks kept": blanks_kept, "plain, blanks dropped": blanks_dropped, "CTC": paper, "prefix": exact},
}
