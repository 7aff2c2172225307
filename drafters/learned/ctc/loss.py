"""The CTC losses over anchors, in chunks: the logits over the vocabulary are never held whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.learned.ctc import alignment
from drafters.learned.ctc.alignment import is_possible
from drafters.learned.ctc.emissions import divergence, emit
from drafters.learned.layers.markov import Markov
from drafters.learned.losses import label_weights
from drafters.learned.losses.chunks import MAX_BYTES, anchors_per_chunk, chunked
from drafters.learned.losses.label_weights import Weights
from drafters.protocol import at_least_one

Objective = Literal["ctc", "prefix"]


def ctc_loss(
    frames: Tensor,
    labels: Tensor,
    valid: Tensor,
    roots: Tensor,
    head: Tensor,
    blank_row: Tensor,
    blank_bias: Tensor,
    markov: Markov | None = None,
    objective: Objective = "prefix",
    weights: Weights = "decay",
    decay: float = 0.9,
    warm_up: float = 0.0,
    distillation: float = 0.0,
    teacher: Tensor | None = None,
    teacher_valid: Tensor | None = None,
    max_bytes: int = MAX_BYTES,
    divisor: Callable[[Tensor], Tensor] = at_least_one,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean loss of the anchors that have a label, and what is worth logging of them.

    ``ctc`` is the paper's equation 6, -log P(the text is y_1..y_n) / n for the n valid labels.
    ``prefix`` is sum_u w_u * -log P(the text begins with y_1..y_u), which is what a verifier rewards. The weights of
    an anchor sum to one: ``decay`` takes w_u ~ decay^(u-1), ``survival`` the w_u that make the gradient that of
    -log of the expected acceptance (``label_weights.by_survival``). Labels no alignment can reach, for want of
    frames, add nothing.

    Args:
        frames: (A, T, D). labels: (A, U) y_1..y_U. valid: (A, U) bool, a leading run. roots: (A,) tokens at the
            anchors. head: (V, D), frozen. blank_row: (D,). blank_bias: ().
        markov: Bias on V + 1 symbols given the last emitted label, the root at first.
        objective: ``ctc`` or ``prefix``.
        weights: ``decay`` or ``survival``; of the prefix objective and of distillation.
        decay: Weight of label u against label u - 1.
        warm_up: Share, 0 to 1, of the plain cross-entropy of frame u on label u, weighted by ``decay``. It keeps the
            blank from taking all frames early in training; frames beyond U are left free.
        distillation: Factor of sum_u w_u KL(base's law || q(. | y_<u)), q the exact law of the draft's next token.
        teacher: (A, U, D) the base's last states at the positions that decide y_1..y_U; needed for distillation.
        teacher_valid: (A, U) bool, where the base has read y_<u; everywhere if None.
        max_bytes: Memory for the tensors of one chunk.
        divisor: As that of a `TrainingBatch`, for the anchors that have a label.

    Returns:
        The loss, and ``blank_share``, the mean p_t(blank | root), and ``expected_acceptance``, the mean of
        sum_u P(text begins with y_1..y_u) over valid labels. Scalars, zero without any label.

    Raises:
        ValueError: for an unknown objective or kind of weights, a share outside 0 to 1, a Markov bias without a
            column for the blank, and distillation without a teacher.
    """
    if objective not in get_args(Objective):
        raise ValueError(f"objective must be one of {', '.join(get_args(Objective))}, not {objective!r}")
    if not 0 <= warm_up <= 1:
        raise ValueError(f"warm_up is a share between 0 and 1, not {warm_up}")
    if markov is not None and len(markov.right) != len(head) + 1:
        raise ValueError(f"the Markov bias of a CTC drafter has {len(head) + 1} columns, not {len(markov.right)}")
    label_weights.check(weights)
    per_anchor = {"frames": frames, "labels": labels, "valid": valid}
    shared = {"blank_row": blank_row, "blank_bias": blank_bias}
    if markov is not None:
        per_anchor["left"] = F.embedding(torch.cat([roots[:, None], labels], 1), markov.left)
        shared["right"] = markov.right
    if distillation:
        if teacher is None:
            raise ValueError(f"distillation ({distillation}) needs the base's last states, but teacher is None")
        per_anchor |= {"teacher": teacher, "taught": valid if teacher_valid is None else valid & teacher_valid}

    def sums(frames, labels, valid, teacher=None, taught=None, **emission) -> tuple[Tensor, Tensor]:
        distributions = emit(frames, labels, head, **emission)
        states = alignment.states(distributions.enter, distributions.stay, distributions.blank, labels)
        exact, prefix = alignment.summed(*states)
        counts = valid & is_possible(prefix)
        prefix = torch.where(counts, prefix, 0.0)
        if weights == "decay":
            weight = label_weights.by_depth(counts, decay, prefix.dtype)
        else:
            weight = label_weights.by_survival(prefix, counts)
        if objective == "prefix":
            loss = -(weight * prefix).sum()
        else:
            lengths = valid.sum(-1)
            log_prob = exact.gather(1, lengths[:, None])[:, 0]
            reached = is_possible(log_prob) & (lengths > 0)
            loss = -(torch.where(reached, log_prob, 0.0) / lengths.clamp(min=1)).sum()
        if warm_up:
            own = distributions.enter.diagonal(dim1=1, dim2=2)  # (A, U): frame u on label u
            plain = -(label_weights.by_depth(valid, decay, own.dtype)[:, : own.shape[1]] * own).sum()
            loss = (1 - warm_up) * loss + warm_up * plain
        if distillation:
            reached = taught & F.pad(counts[:, :-1], (1, 0), value=True)
            apart = divergence(distributions, states, labels, teacher, head)
            loss = loss + distillation * torch.where(reached, weight * apart, 0.0).sum()
        blank_share = (distributions.blank[..., 0].exp().mean(1) * valid[:, 0]).sum()
        return loss, torch.stack([blank_share, alignment.expected_acceptance(prefix, counts).sum()])

    planes = _planes(frames.shape[1], labels.shape[1], markov is not None, bool(distillation))
    size = anchors_per_chunk(round(planes * len(head)), max_bytes)
    loss, (blank_share, acceptance) = chunked(sums, per_anchor, shared, size)
    num_anchors = divisor(valid[:, 0].sum())
    return loss / num_anchors, {
        "blank_share": blank_share / num_anchors,
        "expected_acceptance": acceptance / num_anchors,
    }


def _planes(num_frames: int, num_labels: int, has_bias: bool, is_distilled: bool) -> float:
    """Vectors over the vocabulary alive per anchor at the worst moment, as counted with float32."""
    frames = 2 * num_frames if has_bias or is_distilled else 1.5 * num_frames  # the half is the head's bfloat16
    return frames + has_bias * 2 * (num_labels + 1) + is_distilled * 5 * num_labels
