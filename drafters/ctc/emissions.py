"""The distributions of CTC frames as far as known labels need them: from frame states to the recursion's columns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.ctc.alignment import is_possible
from drafters.losses import gathered_logits


class Emissions(NamedTuple):
    """Frame distributions of A anchors. C is U + 1 (root and y_1..y_U) with a Markov bias, else 1.

    Args:
        enter: (A, T, U) log-probabilities, as `alignment.states` takes them.
        stay: (A, T, U) likewise.
        blank: (A, T, C) likewise.
        exponentials: (A, T, V) exp(z - largest z of the frame), where z are the logits without the bias.
        factors: (A, C, V) exp(B - largest B of a token after that label), or None.
        log_scale: (A, T, C) log of what the product of exponentials and factors lacks to be a probability.
    """

    enter: Tensor
    stay: Tensor
    blank: Tensor
    exponentials: Tensor
    factors: Tensor | None
    log_scale: Tensor


def emit(
    frames: Tensor,
    labels: Tensor,
    head: Tensor,
    blank_row: Tensor,
    blank_bias: Tensor,
    left: Tensor | None = None,
    right: Tensor | None = None,
) -> Emissions:
    """p_t(v | l) = softmax_v(z_t(v) + B[l, v]) over V tokens and the blank, where l is the last emitted label.

    The normalisers of T frames after U + 1 labels are one matrix product, sum_v exp z_t(v) exp B[l, v].

    Args:
        frames: (A, T, D) frame states.
        labels: (A, U) labels y_1..y_U.
        head: (V, D) the base's frozen LM head.
        blank_row: (D,) the blank's weights.
        blank_bias: () the blank's bias.
        left: (A, U + 1, R) left factor of the Markov bias, for the root and y_1..y_U; no bias by default.
        right: (V + 1, R) its right factor.
    """
    index = labels[:, None].expand(-1, frames.shape[1], -1)
    exponentials, largest, picked = gathered_logits.exponentials(gathered_logits.logits(frames, head), index)
    dtype = largest.dtype
    blank = (frames.to(dtype) @ blank_row.to(dtype) + blank_bias.to(dtype))[..., None]  # (A, T, 1)
    if left is None or right is None:
        log_sum = torch.logaddexp(gathered_logits.log_sum(exponentials, largest), blank)
        enter = picked - log_sum
        return Emissions(enter, enter, blank - log_sum, exponentials, None, largest - log_sum)
    left, right = left.to(dtype), right.to(dtype)
    biases = left @ right[:-1].T  # (A, U + 1, V)
    factors, largest_bias, _ = gathered_logits.exponentials(biases, labels.new_empty(*biases.shape[:2], 0))
    largest_bias = largest_bias.mT  # (A, 1, U + 1)
    blank = blank + (left @ right[-1])[:, None]  # (A, T, U + 1)
    sums = gathered_logits.products(exponentials, factors).clamp(min=torch.finfo(dtype).tiny)
    log_sum = torch.logaddexp(sums.log() + largest + largest_bias, blank)
    label_columns = F.embedding(labels, right)
    enter_bias, stay_bias = ((part * label_columns).sum(-1)[:, None] for part in (left[:, :-1], left[:, 1:]))
    enter, stay = picked + enter_bias - log_sum[..., :-1], picked + stay_bias - log_sum[..., 1:]  # (A, T, U)
    return Emissions(enter, stay, blank - log_sum, exponentials, factors, largest + largest_bias - log_sum)


def next_token_probs(
    emissions: Emissions, states: tuple[Tensor, ...], labels: Tensor, merge_repeats: bool = True
) -> Tensor:
    """q(v | y_<u) for u = 1..U, the draft's exact distribution of the token after the labels before:

        q(v | g) = sum_t p_t(v | last g) * [b_{t-1}(g) + (v != last g) * n_{t-1}(g)] / P(text begins with g)

    It sums to one minus the probability that the draft stops at g. Where no alignment reaches y_<u the result is finite
    but meaningless. If equal neighbours are not merged, v may be last g.

    Args:
        emissions: Frame distributions of A anchors.
        states: The result of `alignment.states` for them.
        labels: (A, U) labels y_1..y_U.
        merge_repeats: As `alignment.states` got it.

    Returns:
        (A, U, V)
    """
    num_labels = labels.shape[1]
    entered, blank_end, label_end = (state.transpose(0, 1) for state in states)
    prefix = F.pad(entered.logsumexp(1)[:, :-1], (1, 0))[:, None]  # (A, 1, U): log P(text begins with y_<u)
    prefix = torch.where(is_possible(prefix), prefix, 0.0)
    at_blank = blank_end[:, :-1, :num_labels] - prefix  # (A, T, U)
    anywhere = torch.logaddexp(at_blank, label_end[:, :-1, :num_labels] - prefix)
    q = (anywhere + emissions.log_scale[..., :num_labels]).exp().mT @ emissions.exponentials  # (A, U, V)
    if emissions.factors is not None:
        q = q * emissions.factors[:, :num_labels]
    if merge_repeats:  # then a repetition of the last label needs a blank before it
        repeated = (at_blank[..., 1:] + emissions.stay[..., :-1]).logsumexp(1).exp()  # (A, U - 1)
        q[:, 1:].scatter_(-1, labels[:, :-1, None], repeated[..., None])
    return q
