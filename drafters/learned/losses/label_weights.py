"""How much each label of an anchor counts in a loss: by its depth, or by how often a verifier gets that far."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Weights = Literal["decay", "survival"]


def check(weights: Weights) -> None:
    """Refuse a kind of weights there is not."""
    if weights not in get_args(Weights):
        raise ValueError(f"weights must be one of {', '.join(get_args(Weights))}, not {weights!r}")


def by_depth(counts: Tensor, decay: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """w_u = decay^(u-1) over the labels that count (A, U) bool, normalised to a sum of one: (A, U)."""
    weights = counts * decay ** torch.arange(counts.shape[1], device=counts.device, dtype=dtype)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)


def by_survival(prefix: Tensor, counts: Tensor) -> Tensor:
    """Weights that make a mean of -log P(prefix) climb the expected acceptance: w_u = P_u / sum_i P_i, detached.

    P_u is the probability that the draft's first u tokens are y_1..y_u, so a = sum_u P_u is what a verifier accepts
    of a draft drawn from its law. As grad P_u = P_u grad log P_u,

        grad sum_u w_u * -log P_u = -grad a / a = grad -log a.

    The division by a keeps the size of the gradient where the draft is still poor.

    Args:
        prefix: (A, U) log P_u, finite. counts: (A, U) bool, the labels that count.

    Returns:
        (A, U), of sum one where some label counts, else zero.
    """
    most = prefix.detach().masked_fill(~counts, -torch.inf).amax(-1, keepdim=True).clamp(min=-1e30)
    weights = torch.where(counts, (prefix.detach() - most).exp(), 0.0)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)


def by_token_survival(log_probs: Tensor, counts: Tensor) -> Tensor:
    """The same for a mean of -log p_u of single tokens, where P_u = p_1 * ... * p_u (as in D-PACE).

    Token u counts in every prefix that goes through it: w_u = sum_{i >= u} P_i / sum_i P_i, detached.

    Args:
        log_probs: (A, U) log p_u. counts: (A, U) bool, a leading run.

    Returns:
        (A, U), falling from w_1 = 1; zero where no label counts.
    """
    weights = by_survival(torch.where(counts, log_probs.detach(), 0.0).cumsum(-1), counts)
    return weights.flip(-1).cumsum(-1).flip(-1) * counts
