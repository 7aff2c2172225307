"""The laws of CTC frames, as far as known labels need them: from frame states to the recursion's columns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.learned.ctc.alignment import is_possible
from drafters.learned.losses import gathered_logits

LEAST_LOG_PROB = -60.0
"""Distillation takes what the draft cannot say for this improbable, lest one such token be the whole loss."""


class Emissions(NamedTuple):
    """Laws of the frames of A anchors; C is U + 1, root and y_1..y_U, with a Markov bias, else 1.

    Args:
        enter, stay, blank: (A, T, U), (A, T, U) and (A, T, C) log-probabilities, as ``alignment.states`` takes them.
        exponentials: (A, T, V) exp(z - most), z the logits without bias.
        most: (A, T, 1).
        log_sum: (A, T, C) log of the sum of exp(z + B) over tokens and blank.
        highest: (A, 1, C) the largest B of a token after each of C, zero without a bias.
        left, right: (A, C, R) and (V + 1, R) factors of B, or None.
    """

    enter: Tensor
    stay: Tensor
    blank: Tensor
    exponentials: Tensor
    most: Tensor
    log_sum: Tensor
    highest: Tensor
    left: Tensor | None = None
    right: Tensor | None = None


def emit(
    frames: Tensor,
    labels: Tensor,
    head: Tensor,
    blank_row: Tensor,
    blank_bias: Tensor,
    left: Tensor | None = None,
    right: Tensor | None = None,
) -> Emissions:
    """Laws p_t(v | l) = softmax_v(z_t(v) + B[l, v]) over V tokens and the blank, l the last emitted label.

    The normalisers of T frames after U + 1 labels are one product of matrices, sum_v exp z_t(v) exp B[l, v].

    Args:
        frames: (A, T, D). labels: (A, U). head: (V, D), frozen. blank_row: (D,). blank_bias: ().
        left: (A, U + 1, R) the bias's factor of root, y_1..y_U. right: (V + 1, R); without the two, no bias.
    """
    index = labels[:, None].expand(-1, frames.shape[1], -1)
    exponentials, most, picked = gathered_logits.exponentials(gathered_logits.logits(frames, head), index)
    work = most.dtype
    blank = (frames.to(work) @ blank_row.to(work) + blank_bias.to(work))[..., None]  # (A, T, 1)
    if left is None or right is None:
        log_sum = torch.logaddexp(gathered_logits.log_sum(exponentials, most), blank)
        enter = picked - log_sum
        highest = torch.zeros_like(most[:, :1])
        return Emissions(enter, enter, blank - log_sum, exponentials, most, log_sum, highest)
    left, right = left.to(work), right.to(work)
    biases = left @ right[:-1].T  # (A, U + 1, V)
    factors, highest, _ = gathered_logits.exponentials(biases, labels.new_empty(*biases.shape[:2], 0))
    highest = highest.mT  # (A, 1, U + 1)
    blank = blank + (left @ right[-1])[:, None]  # (A, T, U + 1)
    sums = gathered_logits.products(exponentials, factors).clamp(min=torch.finfo(work).tiny)
    log_sum = torch.logaddexp(sums.log() + most + highest, blank)
    of_labels = F.embedding(labels, right)
    of_enter, of_stay = ((part * of_labels).sum(-1)[:, None] for part in (left[:, :-1], left[:, 1:]))  # (A, 1, U)
    enter, stay = picked + of_enter - log_sum[..., :-1], picked + of_stay - log_sum[..., 1:]
    return Emissions(enter, stay, blank - log_sum, exponentials, most, log_sum, highest, left, right)


def divergence(
    distributions: Emissions, states: tuple[Tensor, ...], labels: Tensor, teacher: Tensor, head: Tensor
) -> Tensor:
    """KL(base's law || q(. | y_<u)) for u = 1..U, where q sums the draft's alignments exactly:

        q(v | g) = sum_t p_t(v | last g) * [b_{t-1}(g) + (v != last g) * n_{t-1}(g)] / P(text begins with g)

    What q leaves to stopping counts as lost. Where no alignment reaches y_<u, the number means nothing.

    Args:
        laws: Of A anchors. states: What ``alignment.states`` made of them. labels: (A, U).
        teacher: (A, U, D) last states of the base at the positions that decide y_1..y_U. head: (V, D).

    Returns:
        (A, U) nats.
    """
    num_labels = labels.shape[1]
    entered, blank_end, label_end = (state.transpose(0, 1) for state in states)
    prefix = F.pad(entered.logsumexp(1)[:, :-1], (1, 0))[:, None]  # (A, 1, U): log P(text begins with y_<u)
    prefix = torch.where(is_possible(prefix), prefix, 0.0)
    at_blank = blank_end[:, :-1, :num_labels] - prefix  # (A, T, U)
    anywhere = torch.logaddexp(at_blank, label_end[:, :-1, :num_labels] - prefix)
    shares = (anywhere + distributions.most + (distributions.highest - distributions.log_sum)[..., :num_labels]).exp()
    q = shares.mT @ distributions.exponentials  # (A, U, V), but for the factor exp(bias)
    distribution, negative_entropy = gathered_logits.teacher_distribution(teacher, head)
    cross = -torch.einsum(
        "auv,auv->au", distribution, q.clamp(min=torch.finfo(q.dtype).tiny).log().clamp(min=LEAST_LOG_PROB)
    )
    if (
        distributions.left is not None and distributions.right is not None
    ):  # the mean of the bias left out of q, less its maximum
        mean = ((distribution @ distributions.right[:-1]) * distributions.left[:, :num_labels]).sum(-1)
        cross = cross - mean + distributions.highest[:, 0, :num_labels]
    # the last label again needs a blank before it: put that one token right
    again, wrong = (
        (source[..., 1:] + distributions.stay[..., :-1]).logsumexp(1).clamp(min=LEAST_LOG_PROB)
        for source in (at_blank, anywhere)
    )
    of_again = distribution[:, 1:].gather(-1, labels[:, :-1, None])[..., 0]  # (A, U - 1)
    return negative_entropy + cross - F.pad(of_again * (again - wrong), (1, 0))
