"""Distillation: the cross-entropy of a draft's next-token distributions with the base's."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drafters.losses import gathered_logits
from drafters.losses.chunks import anchors_per_chunk, chunks


def cross_entropy(logits: Tensor, last_hidden: Tensor, head: Tensor) -> Tensor:
    """-sum_v p(v) log q(v) (N,) of the base's p and q = softmax(logits) at each of N positions.

    It is larger than the KL divergence by the entropy of p and has the same gradient. Takes the drafter's logits
    (N, V), in float32 at least, the base's normed last hidden states (N, D), and its frozen LM head (V, D).
    """
    with torch.no_grad():
        teacher = gathered_logits.logits(last_hidden, head).softmax(-1)
    return F.cross_entropy(logits, teacher.to(logits.dtype), reduction="none")


def cross_entropy_of_states(
    states: Tensor, logits: Callable[[Tensor], Tensor], last_hidden: Tensor, head: Tensor
) -> Tensor:
    """`cross_entropy` at each position (N,), where ``logits`` maps the drafter's states (n, D) to its logits (n, V).

    Logits are computed for a chunk of positions at a time and again in the backward pass, so (N, V) is never stored.
    """

    def losses(states: Tensor, last_hidden: Tensor) -> Tensor:
        return cross_entropy(gathered_logits.at_least_float32(logits(states)), last_hidden, head)

    size = anchors_per_chunk(2, len(head), head.device)
    parts = ((states[here], last_hidden[here]) for here in chunks(len(states), size))
    return torch.cat([checkpoint(losses, *part, use_reentrant=False, preserve_rng_state=False) for part in parts])
