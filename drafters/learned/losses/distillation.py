"""Soft cross-entropy to the base's next-token distribution, a chunk of positions at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from drafters.learned.losses import gathered_logits
from drafters.learned.losses.chunks import chunks


def soft_cross_entropy(
    states: Tensor, read: Callable[[Tensor], Tensor], last_hidden: Tensor, head: Tensor, chunk_positions: int
) -> Tensor:
    """-sum_v p(v) log q(v) at each position, where p is the base's distribution and q the drafter's.

    Logits are computed for a chunk of positions at a time and again in the backward pass, so (N, V) is never stored.

    Args:
        states: (N, D) the drafter's states.
        read: Maps states (n, D) to the drafter's logits (n, V).
        last_hidden: (N, D) the base's normed last hidden states.
        head: (V, D) the base's frozen LM head.
        chunk_positions: Positions per chunk.

    Returns:
        (N,), in float32 at least.
    """

    def losses(states: Tensor, last_hidden: Tensor) -> Tensor:
        probs = gathered_logits.logits(last_hidden, head).softmax(-1)
        return -(probs * gathered_logits.at_least_float32(read(states)).log_softmax(-1)).sum(-1)

    parts = ((states[here], last_hidden[here]) for here in chunks(len(states), chunk_positions))
    return torch.cat([checkpoint(losses, *part, use_reentrant=False, preserve_rng_state=False) for part in parts])
