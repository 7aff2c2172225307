"""The CTC losses over anchors, in chunks: the logits over the vocabulary are never stored completely."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.checks import check_at_least
from drafters.ctc import alignment
from drafters.ctc.alignment import is_possible
from drafters.ctc.emissions import emit, next_token_probs
from drafters.losses import gathered_logits, label_weights
from drafters.losses.anchors import AnchoredFrames
from drafters.losses.chunks import MAX_BYTES, anchors_per_chunk, chunked
from drafters.losses.divergences import divergence
from drafters.losses.label_weights import LabelLossOptions
from drafters.protocol import at_least_one


@dataclass(frozen=True)
class CTCLossOptions(LabelLossOptions):
    """The CTC drafter's loss.

    Args:
        num_labels: U, number of next tokens that a draft is trained on; at most ``num_frames``, fewer if tokens repeat
            and are merged.
        objective: ``ctc``, the paper's sequence loss, or ``prefix``, the weighted log-probabilities of all prefixes,
            which is what verification rewards. The paper's loss has no label weights.
        warm_up_steps: Optimizer steps over which plain cross-entropy fades out, from all of the loss to none. It keeps
            the blank from taking over all frames early in training.
    """

    num_labels: int = 8
    objective: Literal["ctc", "prefix"] = "prefix"
    warm_up_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, num_labels=self.num_labels)
        check_at_least(0, warm_up_steps=self.warm_up_steps)


@dataclass(frozen=True)
class BlankOutput:
    """The output layer of the blank, in addition to the base's LM head.

    Args:
        row: (D,) weights.
        bias: () bias.
    """

    row: Tensor
    bias: Tensor


def ctc_loss(
    anchored: AnchoredFrames,
    head: Tensor,
    blank: BlankOutput,
    bias: tuple[Tensor, Tensor] | None = None,
    options: CTCLossOptions | None = None,
    warm_up: float = 0.0,
    max_bytes: int = MAX_BYTES,
    divisor: Callable[[Tensor], Tensor] = at_least_one,
    merge_repeats: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean loss over the anchors that have a label, and metrics.

    The objective ``ctc`` is the paper's equation 6, -log P(the text is y_1..y_n) / n for the n valid labels. The
    objective ``prefix`` is sum_u w_u * -log P(the text begins with y_1..y_u), which is what a verifier rewards. The
    weights of an anchor sum to one: ``decay`` takes w_u proportional to decay^(u-1), ``survival`` the w_u that make the
    gradient that of -log of the expected acceptance (`label_weights.by_survival`). ``label_weight`` multiplies the
    objective. Distillation adds sum_u w_u d(p, q(. | y_<u)) with the chosen `divergence` d, where p is the base's
    distribution and q the exact distribution of the draft's next token over the (draft) vocabulary. Labels that no
    alignment can reach, because there are too few frames, contribute nothing.

    Args:
        anchored: Frames and labels.
        head: (V, D) the base's frozen LM head.
        blank: The blank's output layer.
        bias: Factors of the Markov bias on the V + 1 logits given the last emitted token: (A, U + 1, R) for the root
            and y_1..y_U, and (V + 1, R); none by default.
        options: The objective and its weights; the defaults of `CTCLossOptions` if not given.
        warm_up: Share, from 0 to 1, of the plain cross-entropy of frame u on label u, weighted by ``decay``. Frames
            beyond U are not trained by it.
        max_bytes: Memory for the tensors of one chunk.
        divisor: As in `TrainingBatch`; it gets the number of anchors that have a label.
        merge_repeats: As in `alignment.collapse`.

    Returns:
        The loss, ``blank_share``, the mean of p_t(blank | root), and ``expected_acceptance``, the mean of
        sum_u P(text begins with y_1..y_u) over valid labels. Scalars, zero without labels.

    Raises:
        ValueError: ``warm_up`` is not a share, the Markov bias has no column for the blank, or distillation has no
            teacher.
    """
    options = options or CTCLossOptions()
    frames, labels, valid = anchored.frames, anchored.labels, anchored.valid
    if not 0 <= warm_up <= 1:
        raise ValueError(f"warm_up is a share between 0 and 1, not {warm_up}")
    if bias is not None and len(bias[1]) != len(head) + 1:
        raise ValueError(f"the Markov bias of a CTC drafter has {len(head) + 1} columns, not {len(bias[1])}")
    per_anchor = {"frames": frames, "labels": labels, "valid": valid}
    shared = {"blank_row": blank.row, "blank_bias": blank.bias}
    if bias is not None:
        per_anchor["left"], shared["right"] = bias
    per_anchor |= anchored.distillation_inputs(options.distillation)

    def sums(frames, labels, valid, teacher=None, teacher_counts=None, **output_weights) -> tuple[Tensor, Tensor]:
        emissions = emit(frames, labels, head, **output_weights)
        states = alignment.states(emissions.enter, emissions.stay, emissions.blank, labels, merge_repeats)
        exact, prefix = alignment.exact_and_prefix(*states)
        counts = valid & is_possible(prefix)
        prefix = torch.where(counts, prefix, 0.0)
        if options.weights == "decay":
            weight = label_weights.by_depth(counts, options.decay, prefix.dtype)
        else:
            weight = label_weights.by_survival(prefix, counts)
        if options.objective == "prefix":
            loss = -(weight * prefix).sum()
        else:
            lengths = valid.sum(-1)
            log_prob = exact.gather(1, lengths[:, None])[:, 0]
            is_reached = is_possible(log_prob) & (lengths > 0)
            loss = -(torch.where(is_reached, log_prob, 0.0) / lengths.clamp(min=1)).sum()
        loss = options.label_weight * loss
        if options.distillation:
            is_reached = teacher_counts & F.pad(counts[:, :-1], (1, 0), value=True)
            base = gathered_logits.teacher_probs(teacher, head, options.teacher_temperature)
            draft = next_token_probs(emissions, states, labels, merge_repeats)
            divergences = divergence(options.divergence, base, draft)
            loss = loss + options.distillation * torch.where(is_reached, weight * divergences, 0.0).sum()
        if warm_up:
            own = emissions.enter.diagonal(dim1=1, dim2=2)  # (A, U): frame u on label u
            plain = -(label_weights.by_depth(valid, options.decay, own.dtype)[:, : own.shape[1]] * own).sum()
            loss = (1 - warm_up) * loss + warm_up * plain
        blank_share = (emissions.blank[..., 0].exp().mean(1) * valid[:, 0]).sum()
        return loss, torch.stack([blank_share, alignment.expected_acceptance(prefix, counts).sum()])

    planes = _planes(frames.shape[1], labels.shape[1], bias is not None, bool(options.distillation))
    size = anchors_per_chunk(round(planes * len(head)), max_bytes)
    loss, (blank_share, acceptance) = chunked(sums, per_anchor, shared, size)
    num_anchors = divisor(valid[:, 0].sum())
    return loss / num_anchors, {
        "blank_share": blank_share / num_anchors,
        "expected_acceptance": acceptance / num_anchors,
    }


def _planes(num_frames: int, num_labels: int, has_bias: bool, is_distilled: bool) -> float:
    """Vectors over the vocabulary that are alive per anchor at the peak, counted in float32."""
    frames = 2 * num_frames if has_bias or is_distilled else 1.5 * num_frames  # the half is the head's bfloat16
    return frames + has_bias * 2 * (num_labels + 1) + is_distilled * 5 * num_labels
