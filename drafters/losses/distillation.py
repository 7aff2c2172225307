"""Divergences from the base's next-token distribution over many positions, a chunk of them at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drafters.losses import gathered_logits
from drafters.losses.chunks import chunks
from drafters.losses.divergences import Divergence, divergence


def distilled(kind: Divergence, logits: Tensor, last_hidden: Tensor, head: Tensor) -> Tensor:
    """The divergence of softmax(logits) from the base's next-token distribution at each position.

    ``kl`` is the cross-entropy -sum_v p(v) log q(v), which is larger than the KL divergence by the entropy of p and has
    the same gradient.

    Args:
        kind: As for `divergences.divergence`.
        logits: (N, V) the drafter's logits, in float32 at least.
        last_hidden: (N, D) the base's normed last hidden states.
        head: (V, D) the base's frozen LM head.

    Returns:
        (N,)
    """
    base = gathered_logits.teacher_probs(last_hidden, head).to(logits.dtype)
    if kind == "kl":
        return F.cross_entropy(logits, base, reduction="none")
    return divergence(kind, base, logits.softmax(-1))


def distillation_loss(
    kind: Divergence,
    states: Tensor,
    read: Callable[[Tensor], Tensor],
    last_hidden: Tensor,
    head: Tensor,
    chunk_positions: int,
) -> Tensor:
    """`distilled` at each position, from the drafter's states.

    Logits are computed for a chunk of positions at a time and again in the backward pass, so (N, V) is never stored.

    Args:
        kind: As for `divergences.divergence`.
        states: (N, D) the drafter's states.
        read: Maps states (n, D) to the drafter's logits (n, V).
        last_hidden: (N, D) the base's normed last hidden states.
        head: (V, D) the base's frozen LM head.
        chunk_positions: Positions per chunk.

    Returns:
        (N,), in float32 at least.
    """

    def losses(states: Tensor, last_hidden: Tensor) -> Tensor:
        return distilled(kind, gathered_logits.at_least_float32(read(states)), last_hidden, head)

    parts = ((states[here], last_hidden[here]) for here in chunks(len(states), chunk_positions))
    return torch.cat([checkpoint(losses, *part, use_reentrant=False, preserve_rng_state=False) for part in parts])
