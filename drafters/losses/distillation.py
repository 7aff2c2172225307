"""Distillation: the base's next-token distributions, and how far those of a draft are from them."""

from collections.abc import Callable
from math import exp

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drafters.losses import gathered_logits
from drafters.losses.chunks import anchors_per_chunk, chunks

MIN_PROB = exp(-60.0)
"""The KL divergence counts tokens that the draft cannot produce as this improbable, so that one cannot dominate."""


@torch.no_grad()
def teacher_probs(last_hidden: Tensor, head: Tensor, temperature: float = 1.0) -> Tensor:
    """The base's next-token distribution (..., V) at its last hidden states (..., D).

    At temperature 0 all of it is on the most probable token.
    """
    scores = gathered_logits.logits(last_hidden, head)
    if not temperature:
        return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
    return (scores / temperature).softmax(-1)


def kl(base: Tensor, draft: Tensor) -> Tensor:
    """KL(p || q) in nats (...) of the base's probabilities p and the draft's q, both (..., V).

    What q lacks to one is the probability that the draft stops, which p never does.
    """
    log_draft = draft.clamp(min=MIN_PROB).log()
    with torch.autocast(base.device.type, enabled=False):  # which would round the products to bfloat16
        return torch.xlogy(base, base).sum(-1) - torch.einsum("...v,...v->...", base, log_draft)


def cross_entropy(logits: Tensor, last_hidden: Tensor, head: Tensor) -> Tensor:
    """-sum_v p(v) log q(v) (N,) of the base's p and q = softmax(logits) at each of N positions.

    It is larger than the KL divergence by the entropy of p and has the same gradient. Takes the drafter's logits
    (N, V), in float32 at least, the base's normed last hidden states (N, D), and its frozen LM head (V, D).
    """
    return F.cross_entropy(logits, teacher_probs(last_hidden, head).to(logits.dtype), reduction="none")


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
