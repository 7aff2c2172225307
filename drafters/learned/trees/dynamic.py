"""Draft trees grown level by level from a drafter that gives a law of the next token at every node."""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import inf, log

import numpy as np
import torch
from torch import Tensor

from drafters.tree import ROOT, ChildDistribution, DraftTree

Step = Callable[[Tensor, Tensor], Tensor]
"""Feed the tokens (A, W) of the next beam, each below a slot (A, W) of the last one; gives their logits (A, W, V)."""


def grow(
    logits: Tensor,
    step: Step,
    depth: int,
    width: int,
    top_k: int,
    num_nodes: int,
    eos: Collection[int] = (),
    min_probability: float = 0.0,
) -> list[DraftTree]:
    """The most probable nodes found by expanding, at every level, the most probable ones (EAGLE-2, section 4).

    A node's score is the probability of its path. Each level, the ``width`` best nodes give ``top_k`` children each;
    in the end the ``num_nodes`` best of all are kept. A child is never more probable than its parent, so they are a
    tree. It is decided on the device and copied to the host once.

    Args:
        logits: (A, V) at A roots. depth: Levels. eos: Tokens with nothing below them.
        min_probability: Nodes less probable than this are left out.

    Returns:
        A trees, the most probable nodes first.
    """
    ends = torch.tensor(sorted(eos), dtype=torch.long, device=logits.device)
    beam = torch.full((len(logits), 1), ROOT, device=logits.device)  # which nodes are expanded
    scores = torch.zeros(beam.shape, dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    logits = logits[:, None]  # (A, 1, V)
    levels: list[Tensor] = []
    found = 0
    while True:
        best = logits.to(scores.dtype).log_softmax(-1).topk(min(top_k, logits.shape[-1]), dim=-1)  # (A, W, k)
        tokens, parents = best.indices.flatten(1), beam[..., None].expand_as(best.indices).flatten(1)  # (A, W * k)
        reached = (scores[..., None] + best.values.clamp(max=0)).flatten(1)
        levels.append(torch.stack([parents, tokens, reached], dim=-1))
        if len(levels) == depth:
            break
        going_on = reached.masked_fill(torch.isin(tokens, ends), -inf)
        scores, index = going_on.topk(min(width, going_on.shape[1]), dim=-1)  # (A, W)
        beam = found + index
        found += tokens.shape[1]
        logits = step(tokens.gather(1, index), index // best.indices.shape[-1])
    floor = log(min_probability) if min_probability > 0 else -inf
    return [_kept(*rows.T, num_nodes, floor) for rows in torch.cat(levels, 1).double().cpu().numpy()]


def _kept(parents: np.ndarray, tokens: np.ndarray, scores: np.ndarray, num_nodes: int, floor: float) -> DraftTree:
    """The best nodes of one root, best first; of equals the one found first, so that a parent precedes its child."""
    order = np.argsort(-scores, kind="stable")[:num_nodes]
    order = order[(scores[order] > -inf) & (scores[order] >= floor)]
    place = np.full(len(tokens) + 1, ROOT)  # the last entry is that of the root, index -1
    place[order] = np.arange(len(order))
    tokens, parents = tokens[order].astype(int).tolist(), place[parents[order].astype(int)].tolist()
    return DraftTree(tokens, parents, probabilities=np.exp(scores[order]))


def draw(
    logits: Tensor,
    step: Step,
    depth: int,
    num_draws: int,
    temperature: float,
    generator: torch.Generator,
    eos: Collection[int] = (),
    with_distributions: bool = True,
) -> list[DraftTree]:
    """Chains drawn from the drafter's own law, with further draws beside each link, for exact rejection.

    At every level ``num_draws`` tokens are drawn with replacement; the chain goes on below the first. Which draw that
    is hangs on nothing the verifier looks at, so multi-round rejection at each node stays exact (`ChildDistribution`).

    Args:
        logits: (A, V) at A roots. depth: Levels. eos: Tokens with nothing below them.
        temperature: Of the law drawn from. with_laws: Whether the trees carry it.
    """
    distributions: list[Tensor] = []
    draws: list[Tensor] = []
    first_slot = torch.zeros(len(logits), 1, dtype=torch.long, device=logits.device)
    while True:
        distribution = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).softmax(-1)
        draws.append(torch.multinomial(distribution, num_draws, replacement=True, generator=generator))  # (A, n)
        distributions.append(distribution)
        if len(draws) == depth:
            break
        logits = step(draws[-1][:, :1], first_slot)[:, 0]
    host = torch.stack(draws, 1).tolist()
    return [
        _chain(levels, [distribution[row] for distribution in distributions] if with_distributions else [], eos)
        for row, levels in enumerate(host)
    ]


def _chain(levels: list[list[int]], probs: list[Tensor], eos: Collection[int]) -> DraftTree:
    tokens: list[int] = []
    parents: list[int] = []
    distributions: list[ChildDistribution] = []
    node = ROOT
    for level, drawn in enumerate(levels):
        nodes = {token: len(tokens) + place for place, token in enumerate(dict.fromkeys(drawn))}
        tokens += nodes
        parents += [node] * len(nodes)
        if probs:
            distributions.append(ChildDistribution(node, probs[level], tuple(nodes[token] for token in drawn)))
        if drawn[0] in eos:
            break
        node = nodes[drawn[0]]
    return DraftTree(tokens, parents, distributions=tuple(distributions))
