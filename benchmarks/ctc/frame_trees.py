"""Draft trees from the frames of one draft, read as tokens or as CTC frames, for ``benchmarks.ctc.paper_table2``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from drafters import CTC, Block, Medusa
from drafters.ctc.trees import collapsed, paper_trees
from drafters.protocol import BaseWeights
from drafters.tree import DraftTree
from drafters.trees.candidates import choose
from drafters.trees.search import Candidates, SearchLimits, search


@dataclass(frozen=True)
class Frames:
    """The distributions of one draft's T frames on the host, restricted to the candidates for its tree.

    Args:
        probs: (T, C) probabilities.
        tokens: (T, C) token ids, or (C,) if all frames have the same candidates.
        blank: (T,) probability of the blank; empty if the drafter has no blank.
        blank_id: V, the id of the blank, after the vocabulary.
    """

    probs: np.ndarray
    tokens: np.ndarray
    blank: np.ndarray = field(default_factory=lambda: np.empty(0))
    blank_id: int = -1


@torch.inference_mode()
def frames_at(
    drafter: Medusa | Block | CTC, hidden: Tensor, input_ids: Tensor, anchors: Tensor, base_weights: BaseWeights
) -> list[Frames]:
    """Return the frames that decoding would compute at several anchors of a known text.

    The arguments have the shapes of those of ``draft_at``; anchors are at least 1.
    """
    frames: list[Frames] = []
    if isinstance(drafter, Medusa):
        states = drafter.encode(hidden[None])[0]
        for part in anchors.split(drafter.chunk_anchors):
            probs, tokens = (each.cpu().numpy() for each in drafter(states[part - 1], base_weights, drafter.top_k))
            frames += [Frames(*each) for each in zip(probs, tokens, strict=True)]
        return frames
    for part in anchors.split(drafter.chunk_anchors):
        roots = input_ids[part]
        given = hidden[None], part[None], roots[None], base_weights.embedding, input_ids[None]
        states = drafter(*given)[0]  # (A, T, D)
        weights, _, vocabulary = drafter.output(base_weights)
        logits, num_drafted = drafter.logits(states, weights), len(weights.head)
        candidates = choose(logits, roots, num_drafted, drafter.num_candidates, vocabulary=vocabulary)
        for draft, (tokens, probs) in enumerate(zip(candidates.tokens, candidates.probs, strict=True)):
            if candidates.blank is not None:
                frames.append(Frames(probs, tokens, candidates.blank[draft], drafter.vocab_size))
            else:
                frames.append(Frames(probs, tokens))
    return frames


# ---- ways to make a draft tree from frames, a node budget, a maximum depth and the EOS tokens


def searched(probs: np.ndarray, tokens: np.ndarray, limits: SearchLimits, blank: np.ndarray | None = None) -> DraftTree:
    """The tree of one draft; with a blank, of CTC frames."""
    return search(Candidates(tokens[None], probs[None], None if blank is None else blank[None]), limits)[0]


def plain(frames: Frames, num_nodes: int, max_depth: int, eos: Collection[int] = ()) -> DraftTree:
    """Read frame u as the u-th token; the most probable paths form the tree."""
    return searched(frames.probs, frames.tokens, SearchLimits(num_nodes, max_depth, eos))


def transformed(frames: Frames, num_nodes: int, max_depth: int, eos: Collection[int] = ()) -> DraftTree:
    """Apply the CTC transform to `plain`, for frames without a blank."""
    return collapsed(plain(frames, num_nodes, max_depth, eos))


def blanks_kept(frames: Frames, num_nodes: int, max_depth: int, eos: Collection[int] = ()) -> DraftTree:
    """Read frame u as the u-th token, where a blank is one of the tokens.

    The base never writes a blank, so blanks and the nodes below them are then left out; with them, as many tokens would
    be accepted.
    """
    symbols, ids = np.column_stack([frames.probs, frames.blank]), np.append(frames.tokens, frames.blank_id)
    tree = searched(symbols, ids, SearchLimits(num_nodes, max_depth, eos))
    paths = map(tree.path_tokens, range(len(tree)))
    return DraftTree.from_paths([path for path in paths if frames.blank_id not in path])


def blanks_dropped(frames: Frames, num_nodes: int, max_depth: int, eos: Collection[int] = ()) -> DraftTree:
    """Read frame u as the u-th token, given that it is not the blank."""
    written = np.maximum(1 - frames.blank, np.finfo(frames.blank.dtype).tiny)
    return searched(frames.probs / written[:, None], frames.tokens, SearchLimits(num_nodes, max_depth, eos))


def paper(frames: Frames, num_nodes: int, max_depth: int, eos: Collection[int] = ()) -> DraftTree:
    """Apply the CTC transform to the most probable frame sequences, including blanks (CTC-drafter, section 3.3).

    It transforms the same tree as `blanks_kept`, and equals the drafter's ``tree: paper`` without its limit ``top_k``
    on the candidates of each frame.
    """
    candidates = Candidates(frames.tokens[None], frames.probs[None], frames.blank[None])
    return paper_trees(candidates, SearchLimits(num_nodes, max_depth, eos))[0]


def exact(frames: Frames, num_nodes: int, max_depth: int, eos: Collection[int] = ()) -> DraftTree:
    """Return the most probable texts, each summed over its frame sequences: the drafter's ``tree: prefix``."""
    return searched(frames.probs, frames.tokens, SearchLimits(num_nodes, max_depth, eos), frames.blank)


Build = Callable[[Frames, int, int, Collection[int]], DraftTree]
CROSS_ENTROPY: dict[str, Build] = {"plain": plain, "CTC": transformed}
WAYS: dict[str, dict[str, Build]] = {
    "Medusa": CROSS_ENTROPY,
    "Block": CROSS_ENTROPY,
    "CTC": {"plain, blanks kept": blanks_kept, "plain, blanks dropped": blanks_dropped, "CTC": paper, "prefix": exact},
}
