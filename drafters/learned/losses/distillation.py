"""Soft cross-entropy to the base's law, a chunk of positions at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from drafters.learned.losses import gathered_logits


def soft_cross_entropy(
    states: Tensor, read: Callable[[Tensor], Tensor], last: Tensor, head: Tensor, chunk_positions: int
) -> Tensor:
    """-sum_v p(v) log q(v) at each position, p the base's law and q the drafter's, without ever holding (N, V).

    Positions are read a chunk at a time, and a chunk's logits are computed again in the backward pass.

    Args:
        states: (N, D) the drafter's. read: From (n, D) to logits (n, V).
        last: (N, D) the base's normed last states. head: (V, D), frozen.

    Returns:
        (N,), float32 at least.
    """

    def losses(states: Tensor, last: Tensor) -> Tensor:
        distribution = gathered_logits.logits(last, head).softmax(-1)
        return -(distribution * gathered_logits.wide(read(states)).log_softmax(-1)).sum(-1)

    parts = zip(states.split(chunk_positions), last.split(chunk_positions), strict=True)
    return torch.cat([checkpoint(losses, *part, use_reentrant=False, preserve_rng_state=False) for part in parts])
