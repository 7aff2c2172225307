"""How far a draft's next-token distribution is from the base's: KL divergence, and losses of the acceptance itself."""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drafters.checks import check_choices
from drafters.losses import gathered_logits
from drafters.losses.chunks import anchors_per_chunk, chunks

Divergence = Literal["kl", "tv", "lk", "lk_hybrid"]

MIN_PROB = exp(-60.0)
"""The KL divergence counts tokens that the draft cannot produce as this improbable, so that one cannot dominate."""
HYBRID_RATE = 3.0
"""How fast the hybrid turns from the KL divergence to total variation as the acceptance grows."""


@dataclass(frozen=True)
class DivergenceOptions:
    """How a loss compares the base's next-token distribution with the drafter's.

    Args:
        divergence: Divergence between the base's next-token distribution and the drafter's: ``kl``, the KL divergence,
            or a loss of the acceptance in rejection sampling: ``tv``, the total variation distance; ``lk``, -log of the
            acceptance; ``lk_hybrid``, KL at first and total variation where the draft is good (LK losses).
    """

    divergence: Divergence = "kl"

    def __post_init__(self) -> None:
        check_choices(self)


def acceptance(base: Tensor, draft: Tensor) -> Tensor:
    """sum_v min(p(v), q(v)) (...), the probability that rejection sampling accepts a token drawn from the draft.

    It is 1 - TV(p, q) of the base's probabilities p and the draft's q, both (..., V), where the probability that the
    draft stops, 1 - sum_v q(v), counts as one more token. If p is certain of one token, as in greedy decoding, it is q
    of that token.
    """
    return torch.minimum(base, draft).sum(-1)


def kl(base: Tensor, draft: Tensor) -> Tensor:
    """KL(p || q) in nats (...) of probabilities (..., V), as for `acceptance`."""
    log_draft = draft.clamp(min=MIN_PROB).log()
    with torch.autocast(base.device.type, enabled=False):  # which would round the products to bfloat16
        return torch.xlogy(base, base).sum(-1) - torch.einsum("...v,...v->...", base, log_draft)


def divergence(kind: Divergence, base: Tensor, draft: Tensor) -> Tensor:
    """The divergence (...) of the draft's probabilities q from the base's p, both (..., V).

    With the acceptance a, ``kl`` is KL(p || q), ``tv`` the total variation distance 1 - a, ``lk`` -log a, and
    ``lk_hybrid`` e KL(p || q) + (1 - e) (1 - a) with e = exp(-3 a), which gets no gradient: mostly KL while the draft
    is poor, and mostly total variation when it is good (LK losses, arXiv 2602.23881).
    """
    if kind == "kl":
        return kl(base, draft)
    accepted = acceptance(base, draft)
    if kind == "tv":
        return 1 - accepted
    if kind == "lk":
        return -accepted.clamp(min=torch.finfo(accepted.dtype).tiny).log()
    share = (-HYBRID_RATE * accepted.detach()).exp()
    return share * kl(base, draft) + (1 - share) * (1 - accepted)


def distilled(kind: Divergence, logits: Tensor, last_hidden: Tensor, head: Tensor) -> Tensor:
    """The divergence (N,) of softmax(logits) from the base's next-token distribution at each of N positions.

    ``kl`` is the cross-entropy -sum_v p(v) log q(v), which is larger than the KL divergence by the entropy of p and has
    the same gradient. Takes the drafter's logits (N, V), in float32 at least, the base's normed last hidden states
    (N, D), and its frozen LM head (V, D).
    """
    base = gathered_logits.teacher_probs(last_hidden, head).to(logits.dtype)
    if kind == "kl":
        return F.cross_entropy(logits, base, reduction="none")
    return divergence(kind, base, logits.softmax(-1))


def distillation_loss(
    kind: Divergence, states: Tensor, logits: Callable[[Tensor], Tensor], last_hidden: Tensor, head: Tensor
) -> Tensor:
    """`distilled` at each position (N,), where ``logits`` maps the drafter's states (n, D) to its logits (n, V).

    Logits are computed for a chunk of positions at a time and again in the backward pass, so (N, V) is never stored.
    """

    def losses(states: Tensor, last_hidden: Tensor) -> Tensor:
        return distilled(kind, gathered_logits.at_least_float32(logits(states)), last_hidden, head)

    size = anchors_per_chunk(2, len(head), head.device)
    parts = ((states[here], last_hidden[here]) for here in chunks(len(states), size))
    return torch.cat([checkpoint(losses, *part, use_reentrant=False, preserve_rng_state=False) for part in parts])
