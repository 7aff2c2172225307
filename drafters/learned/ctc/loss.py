"""The CTC losses over anchors, holding only the label columns of the vocabulary."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from drafters.learned.ctc.alignment import IMPOSSIBLE, prefix_log_probs

Objective = Literal["ctc", "prefix"]


def gathered_log_probs(
    frames: Tensor, labels: Tensor, head: Tensor, blank_row: Tensor, blank_bias: Tensor, chunk_anchors: int
) -> tuple[Tensor, Tensor]:
    """log p_t of the labels and of the blank, without ever holding (A, T, V).

    Anchors go through the head a chunk at a time, and a chunk's logits are computed again in the backward pass.

    Args:
        frames: (A, T, D). labels: (A, U). head: (V, D), frozen. blank_row: (D,), trainable. blank_bias: (),
            trainable.

    Returns:
        (A, T, U) and (A, T), float32.
    """

    def columns(frames: Tensor, labels: Tensor, blank_row: Tensor, blank_bias: Tensor) -> tuple[Tensor, Tensor]:
        logits = (frames.to(head.dtype) @ head.T).float()  # (a, T, V)
        blank = (frames @ blank_row).float() + blank_bias.float()
        normaliser = torch.logaddexp(logits.logsumexp(-1), blank)
        index = labels[:, None].expand(-1, frames.shape[1], -1)
        return logits.gather(-1, index) - normaliser[..., None], blank - normaliser

    parts = [
        checkpoint(columns, part, label, blank_row, blank_bias, use_reentrant=False, preserve_rng_state=False)
        for part, label in zip(frames.split(chunk_anchors), labels.split(chunk_anchors), strict=True)
    ]
    return torch.cat([label for label, _ in parts]), torch.cat([blank for _, blank in parts])


def anchor_loss(
    label_log_probs: Tensor, blank_log_probs: Tensor, labels: Tensor, valid: Tensor, objective: Objective, decay: float
) -> Tensor:
    """Loss of each anchor.

    ``ctc`` is the paper's equation 6, -log P(the text is y_1..y_n) for the n valid labels, divided by n.
    ``prefix`` is sum_u w_u * -log P(the text begins with y_1..y_u) with w_u = decay^(u-1), normalised: what a
    verifier rewards. Labels no alignment can reach (more repeats than spare frames) add nothing.

    Args:
        label_log_probs: (A, T, U). blank_log_probs: (A, T). labels: (A, U). valid: (A, U) bool, a leading run.

    Returns:
        (A,), zero where an anchor has no valid label.
    """
    exact, prefix = prefix_log_probs(label_log_probs, blank_log_probs, labels)
    if objective == "ctc":
        lengths = valid.sum(-1)
        log_prob = exact.gather(1, lengths[:, None])[:, 0]
        reachable = (log_prob > IMPOSSIBLE / 2) & (lengths > 0)
        return torch.where(reachable, -log_prob, 0.0) / lengths.clamp(min=1)
    weights = valid * decay ** torch.arange(labels.shape[1], device=labels.device)
    weights = weights * (prefix > IMPOSSIBLE / 2)
    return -(weights * torch.where(weights > 0, prefix, 0.0)).sum(-1) / weights.sum(-1).clamp(min=1e-6)
