"""Cross-entropy of block drafters over anchors, in chunks: frame u is the law of label u."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.learned.layers.markov import Markov
from drafters.learned.losses import gathered_logits, label_weights
from drafters.learned.losses.chunks import MAX_BYTES, anchors_per_chunk, chunked
from drafters.learned.losses.label_weights import Weights
from drafters.protocol import at_least_one


def cross_entropy(
    frames: Tensor,
    labels: Tensor,
    valid: Tensor,
    roots: Tensor,
    head: Tensor,
    markov: Markov | None = None,
    weights: Weights = "decay",
    decay: float = 0.9,
    distillation: float = 0.0,
    teacher: Tensor | None = None,
    teacher_valid: Tensor | None = None,
    max_bytes: int = MAX_BYTES,
    divisor: Callable[[Tensor], Tensor] = at_least_one,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean over anchors that have a label of sum_u w_u * -log p_u(y_u | y_{u-1}), and what is worth logging.

    p_u(v | l) = softmax_v(z_u(v) + B[l, v]) over the V tokens. ``decay`` takes w_u ~ decay^(u-1), of sum one;
    ``survival`` the w_u that make the gradient that of -log of the expected acceptance
    (``label_weights.by_token_survival``).

    Args:
        frames: (A, T, D) with T at least U; later frames are left free. labels: (A, U). valid: (A, U) bool, a leading
            run. roots: (A,) tokens at the anchors. head: (V, D), frozen.
        markov: Bias on V symbols given the token before.
        weights: ``decay`` or ``survival``.
        decay: Weight of label u against label u - 1.
        distillation: Factor of sum_u w_u KL(base's law || p_u(. | y_{u-1})).
        teacher: (A, U, D) the base's last states at the positions that decide y_1..y_U; needed for distillation.
        teacher_valid: (A, U) bool, where the base has read y_<u; everywhere if None.
        max_bytes: Memory for the tensors of one chunk.
        divisor: As that of a `TrainingBatch`, for the anchors that have a label.

    Returns:
        The loss, and ``expected_acceptance``, the mean of sum_u p_1(y_1) ... p_u(y_u). Scalars, zero without labels.

    Raises:
        ValueError: for fewer frames than labels, an unknown kind of weights, a Markov bias of another width, and
            distillation without a teacher.
    """
    num_labels = labels.shape[1]
    if frames.shape[1] < num_labels:
        raise ValueError(f"cross-entropy wants a frame for each of {num_labels} labels, not {frames.shape[1]} frames")
    if markov is not None and len(markov.right) != len(head):
        raise ValueError(f"the Markov bias of this drafter has {len(head)} columns, not {len(markov.right)}")
    label_weights.check(weights)
    per_anchor, shared = {"frames": frames[:, :num_labels], "labels": labels, "valid": valid}, {}
    if markov is not None:
        per_anchor["left"] = F.embedding(torch.cat([roots[:, None], labels[:, :-1]], 1), markov.left)
        shared["right"] = markov.right
    if distillation:
        if teacher is None:
            raise ValueError(f"distillation ({distillation}) needs the base's last states, but teacher is None")
        per_anchor |= {"teacher": teacher, "taught": valid if teacher_valid is None else valid & teacher_valid}

    def sums(frames, labels, valid, teacher=None, taught=None, left=None, right=None) -> tuple[Tensor, Tensor]:
        logits = gathered_logits.logits(frames, head)
        if left is not None:
            logits += left.to(logits.dtype) @ right.to(logits.dtype).T
        exponentials, most, picked = gathered_logits.exponentials(logits, labels[..., None])
        log_sum = gathered_logits.log_sum(exponentials, most)
        log_probs = (picked - log_sum)[..., 0]  # (A, U)
        if weights == "decay":
            weight = label_weights.by_depth(valid, decay, log_probs.dtype)
        else:
            weight = label_weights.by_token_survival(log_probs, valid)
        loss = -(weight * log_probs).sum()
        if distillation:
            distribution, negative_entropy = gathered_logits.teacher_distribution(teacher, head)
            scores = exponentials.clamp(min=torch.finfo(exponentials.dtype).tiny).log()  # z - most
            apart = negative_entropy - torch.einsum("auv,auv->au", distribution, scores) + (log_sum - most)[..., 0]
            loss = loss + distillation * (weight * taught * apart).sum()
        reached = torch.where(valid, log_probs, -torch.inf).cumsum(-1).exp()
        return loss, reached.sum()

    planes = num_labels * (6 if distillation else 2.5 if markov is not None else 1.5)
    size = anchors_per_chunk(round(planes * len(head)), max_bytes)
    loss, acceptance = chunked(sums, per_anchor, shared, size)
    num_anchors = divisor(valid[:, 0].sum())
    return loss / num_anchors, {"expected_acceptance": acceptance / num_anchors}
