"""Draft trees grown level by level, from a drafter that predicts the next token at every node."""

from collections.abc import Callable, Collection, Sequence
from math import inf, log

import numpy as np
import torch
from torch import Tensor

from drafters.nn.table import Table
from drafters.protocol import Limits
from drafters.tree import ROOT, DraftTree

FeedBeam = Callable[[Tensor, Tensor], Tensor]
"""Feeds the tokens (A, W) of the next beam, each below a slot (A, W) of the previous one; returns logits (A, W, V)."""


def grow(logits: Tensor, feed: FeedBeam, width: int, top_k: int, depth: int, eos: Collection[int] | Tensor) -> Table:
    """The nodes that are found by expanding the most probable ones at each level (EAGLE-2, section 4).

    The score of a node is the probability of its path. At each level the ``width`` best nodes get ``top_k`` children
    each, except below an end-of-sequence token. All of this runs on the device. Takes logits (A, V) at A roots, and
    what runs the draft module on the next level, of which there are ``depth``. Returns for each level its N nodes
    (A, N, 3): the index of the parent among all nodes, the token, and the logarithm of the score.
    """
    beam = torch.full((len(logits), 1), ROOT, device=logits.device)  # the nodes that are expanded
    scores = torch.zeros(beam.shape, dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    logits = logits[:, None]  # (A, 1, V)
    levels: list[Tensor] = []
    num_found = 0
    while True:
        best = logits.to(scores.dtype).log_softmax(-1).topk(min(top_k, logits.shape[-1]), dim=-1)  # (A, W, k)
        tokens, parents = best.indices.flatten(1), beam[..., None].expand_as(best.indices).flatten(1)  # (A, W * k)
        path_scores = (scores[..., None] + best.values.clamp(max=0)).flatten(1)
        levels.append(torch.stack([parents, tokens, path_scores], dim=-1))
        if len(levels) == depth:
            return Table.of(levels, torch.float64)
        expandable = path_scores
        if isinstance(eos, Tensor):
            expandable = expandable.masked_fill((tokens[..., None] == eos).any(-1), -inf)
        else:
            for end in eos:  # compared one by one, so that no tensor of them is copied to the device
                expandable = expandable.masked_fill(tokens == end, -inf)
        scores, index = expandable.topk(min(width, expandable.shape[1]), dim=-1)  # (A, W)
        beam = num_found + index
        num_found += tokens.shape[1]
        logits = feed(tokens.gather(1, index), index // best.indices.shape[-1])


def best_nodes(levels: Sequence[np.ndarray], limits: Limits, num_nodes: int, least: float = 0.0) -> list[DraftTree]:
    """The trees of the best nodes that `grow` found for each root: a child is never more probable than its parent.

    Nodes whose probability is below the ``least`` are left out.
    """
    floor, num_nodes = log(least) if least > 0 else -inf, min(num_nodes, limits.max_nodes)
    nodes = np.concatenate(levels[: limits.max_depth], 1).transpose(0, 2, 1)  # (A, 3, N)
    return [_best_nodes(parents, tokens, scores, num_nodes, floor) for parents, tokens, scores in nodes]


def _best_nodes(parents: np.ndarray, tokens: np.ndarray, scores: np.ndarray, num_nodes: int, floor: float) -> DraftTree:
    """The tree of the best nodes of one root, best first.

    Among equals the node found first comes first, so that a parent precedes its children.
    """
    order = np.argsort(-scores, kind="stable")[:num_nodes]
    order = order[(scores[order] > -inf) & (scores[order] >= floor)]
    place = np.full(len(tokens) + 1, ROOT)  # the last entry is the root's, whose index is -1
    place[order] = np.arange(len(order))
    return DraftTree(
        tokens[order].astype(int).tolist(),
        place[parents[order].astype(int)].tolist(),
        probabilities=np.exp(scores[order]).tolist(),
    )
