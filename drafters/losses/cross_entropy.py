"""Cross-entropy of block drafters over anchors, in chunks: frame u predicts label u."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from drafters.losses import gathered_logits, label_weights
from drafters.losses.anchors import AnchoredFrames
from drafters.losses.chunks import MAX_BYTES, anchors_per_chunk, chunked
from drafters.losses.divergences import divergence
from drafters.losses.label_weights import LabelLossOptions
from drafters.protocol import at_least_one


def cross_entropy(
    anchored: AnchoredFrames,
    head: Tensor,
    bias: tuple[Tensor, Tensor] | None = None,
    options: LabelLossOptions | None = None,
    max_bytes: int = MAX_BYTES,
    divisor: Callable[[Tensor], Tensor] = at_least_one,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean of sum_u w_u * -log p_u(y_u | y_{u-1}) over the anchors that have a label, and metrics.

    p_u(v | l) = softmax_v(z_u(v) + B[l, v]) over the V tokens. With the weights ``decay``, w_u is proportional to
    decay^(u-1) and sums to one; with ``survival`` the gradient is that of -log of the expected acceptance
    (`label_weights.by_token_survival`). ``label_weight`` multiplies these terms. Distillation adds sum_u w_u
    d(p, p_u(. | y_{u-1})) with the chosen `divergence` d from the base's distribution p.

    Args:
        anchored: Frames and labels. Frames beyond the number of labels are not trained.
        head: (V, D) the base's frozen LM head.
        bias: Factors of the Markov bias on the V logits given the previous token: (A, U + 1, R) for the root and
            y_1..y_U, of which the last is not needed, and (V, R); none by default.
        options: Weights of the labels and of distillation; the defaults of `LabelLossOptions` if not given.
        max_bytes: Memory for the tensors of one chunk.
        divisor: As in `TrainingBatch`; it gets the number of anchors that have a label.

    Returns:
        The loss, and ``expected_acceptance``, the mean of sum_u p_1(y_1) ... p_u(y_u). Scalars, zero without labels.

    Raises:
        ValueError: There are fewer frames than labels, the Markov bias has another number of columns, or distillation
            has no teacher.
    """
    options = options or LabelLossOptions()
    frames, labels, valid = anchored.frames, anchored.labels, anchored.valid
    num_labels = labels.shape[1]
    if frames.shape[1] < num_labels:
        raise ValueError(f"cross-entropy needs a frame for each of {num_labels} labels, not {frames.shape[1]} frames")
    if bias is not None and len(bias[1]) != len(head):
        raise ValueError(f"the Markov bias of this drafter has {len(head)} columns, not {len(bias[1])}")
    per_anchor, shared = {"frames": frames[:, :num_labels], "labels": labels, "valid": valid}, {}
    if bias is not None:
        per_anchor["left"], shared["right"] = bias[0][:, :num_labels], bias[1]
    per_anchor |= anchored.distillation_inputs(options.distillation)

    def sums(frames, labels, valid, teacher=None, teacher_counts=None, left=None, right=None) -> tuple[Tensor, Tensor]:
        logits = gathered_logits.logits(frames, head)
        if left is not None:
            logits += left.to(logits.dtype) @ right.to(logits.dtype).T
        exponentials, largest, picked = gathered_logits.exponentials(logits, labels[..., None])
        log_sum = gathered_logits.log_sum(exponentials, largest)
        log_probs = (picked - log_sum)[..., 0]  # (A, U)
        if options.weights == "decay":
            weight = label_weights.by_depth(valid, options.decay, log_probs.dtype)
        else:
            weight = label_weights.by_token_survival(log_probs, valid)
        loss = -options.label_weight * (weight * log_probs).sum()
        if options.distillation:
            base = gathered_logits.teacher_probs(teacher, head, options.teacher_temperature)
            divergences = divergence(options.divergence, base, exponentials * (largest - log_sum).exp())
            loss = loss + options.distillation * (weight * teacher_counts * divergences).sum()
        prefix_probs = torch.where(valid, log_probs, -torch.inf).cumsum(-1).exp()
        return loss, prefix_probs.sum()

    # Vectors over the vocabulary alive per anchor and label; the half is the head's bfloat16.
    planes = num_labels * (7 if options.distillation else 2.5 if bias is not None else 1.5)
    size = anchors_per_chunk(round(planes * len(head)), max_bytes)
    loss, acceptance = chunked(sums, per_anchor, shared, size)
    num_anchors = divisor(valid[:, 0].sum())
    return loss / num_anchors, {"expected_acceptance": acceptance / num_anchors}
