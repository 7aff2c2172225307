"""How far a draft's next-token distribution is from the base's: KL divergence, and losses of the acceptance itself."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import Literal

import torch
from torch import Tensor

from drafters.checks import check_choices

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
    """sum_v min(p(v), q(v)), the probability that rejection sampling accepts a token drawn from the draft.

    It is 1 - TV(p, q), where the probability that the draft stops counts as one more token. If p is certain of one
    token, as in greedy decoding, it is q of that token.

    Args:
        base: (..., V) probabilities p.
        draft: (..., V) probabilities q, with a sum of at most one.

    Returns:
        (...), between 0 and 1 up to rounding.
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
