"""Anchors: the training positions that drafts start from, their labels, and what the losses of the labels share."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.checks import check_at_least
from drafters.losses.chunks import chunked

IMPOSSIBLE = -1e30
"""Log-probability of the impossible; finite, so that the difference of two of them is finite too."""


@dataclass(frozen=True)
class LabelLossOptions:
    """How the labels after an anchor enter the loss.

    Args:
        decay: Weight of label u relative to label u - 1.
        num_anchors: Anchors sampled from each training sequence; 0 takes every assistant position.
        num_columns: Number of tokens that a training step compares: the labels, and a random sample of the others that
            stands for all; null for the whole (draft) vocabulary.
    """

    decay: float = 0.9
    num_anchors: int = 64
    num_columns: int | None = None

    def __post_init__(self) -> None:
        check_at_least(0, decay=self.decay, num_anchors=self.num_anchors)
        check_at_least(1, num_columns=self.num_columns or 1)


class AnchoredFrames(NamedTuple):
    """Frames drafted at A anchors, and what they should predict."""

    frames: Tensor  # (A, T, D) frame states
    labels: Tensor  # (A, U) the base's next tokens y_1..y_U
    valid: Tensor  # (A, U) bool, a leading run: the labels inside the assistant's turn
    left: Tensor | None = None  # (A, U + 1, R) left factor of the Markov bias after the root and y_1..y_U
    copied: Tensor | None = None  # (A, U) bool, where the passage of a lookup begins with y_1..y_u, if it is copied
    copy_logits: Tensor | None = None  # (A,) logits that the draft is this passage

    def with_copies(self, log_probs: Tensor) -> Tensor:
        """log P(the draft begins with y_1..y_u) (A, U), from that of a draft that is no copy.

        With probability c the draft is the passage, so that is c * [the passage begins so] + (1 - c) * P.
        """
        if self.copied is None or self.copy_logits is None:
            return log_probs
        copy, no_copy = F.logsigmoid(self.copy_logits)[:, None], F.logsigmoid(-self.copy_logits)[:, None]
        return torch.logaddexp(no_copy + log_probs, torch.where(self.copied, copy, IMPOSSIBLE))


def sample(loss_mask: Tensor, num_anchors: int) -> tuple[Tensor, Tensor]:
    """Sample up to ``num_anchors`` of each sequence's valid positions without replacement, or take all if it is 0.

    Valid are those that have a predecessor and whose next token is an assistant token. Returns ``anchors`` (B, A),
    sorted, and ``is_valid`` (B, A) bool, false where a sequence has fewer valid positions than A, which is at least 1.
    ``loss_mask`` (B, S) bool is true on assistant tokens.
    """
    valid = F.pad(loss_mask[:, 1:], (0, 1))
    valid[:, 0] = False  # a draft at the first position would have no context
    num_sampled = int(valid.sum(1).max().clamp(1, num_anchors or None))
    scores = torch.rand(valid.shape, device=valid.device).masked_fill(~valid, -1.0)
    anchors = scores.topk(num_sampled, dim=1).indices.sort(1).values
    return anchors, valid.gather(1, anchors)


def following(labels: Tensor, loss_mask: Tensor, anchors: Tensor, num_labels: int) -> tuple[Tensor, Tensor]:
    """The base's next tokens y_1..y_U after each anchor (B, A), up to the end of the assistant's turn.

    Takes its next token at each position (B, S), and a mask of the assistant's tokens (B, S) bool. Returns ``targets``
    (B, A, U), and ``valid`` (B, A, U) bool, true on a leading run.
    """
    num_positions = labels.shape[1]
    at = anchors[..., None] + torch.arange(num_labels, device=anchors.device)  # (B, A, U): y_u stands at a + u - 1
    inside = at + 1 < num_positions
    at = at.clamp(max=num_positions - 2)
    batch = torch.arange(len(labels), device=labels.device)[:, None, None]
    valid = (inside & loss_mask[batch, at + 1]).int().cumprod(-1).bool()
    return labels[batch, at], valid


def sample_columns(
    x: AnchoredFrames, head: Tensor, right: Tensor | None, num_columns: int, has_blank: bool
) -> tuple[AnchoredFrames, Tensor, Tensor | None]:
    """Keep all valid labels and a uniform sample of the other columns, without replacement.

    Each sampled column is weighted by the inverse of its probability of being sampled, as in importance sampling. So
    the sum over the vocabulary in each normaliser is right on average, with K / V of the products and exponentials. The
    weights enter as one more rank of the Markov bias, zero for the labels and the blank.

    The labels are columns of the LM head (V, D). The right factors of the bias are (V, R), or (V + 1, R) if there is a
    blank, whose row is the last. K is ``num_columns``, or more where the batch has more labels. Returns the same
    anchors with labels among the K columns, rows (K, D) of the head, and the right factors of the bias.
    """
    is_label = torch.zeros(len(head), dtype=torch.bool, device=head.device)
    is_label[x.labels[x.valid]] = True
    num_labels = int(is_label.sum())
    if (num_columns := max(num_columns, num_labels)) >= len(head):
        return x, head, right
    # Labels have the largest scores, so they come first.
    columns = torch.rand(len(head), device=head.device).masked_fill(is_label, 2.0).topk(num_columns).indices
    share = (num_columns - num_labels) / (len(head) - num_labels)  # of the other columns that are kept
    offsets = torch.zeros(num_columns + has_blank, 1, device=head.device)
    offsets[num_labels:num_columns] = -math.log(share) if share else 0.0
    places = torch.zeros(len(head), dtype=torch.long, device=head.device)
    places[columns] = torch.arange(num_columns, device=head.device)
    left = x.left
    if left is None or right is None:
        left, right = x.frames.new_ones(len(x.labels), x.labels.shape[1] + 1, 1), offsets
    else:
        kept = F.pad(columns, (0, 1), value=len(head)) if has_blank else columns
        left, right = torch.cat([left, torch.ones_like(left[..., :1])], -1), torch.cat([right[kept], offsets], -1)
    return x._replace(labels=places[x.labels], left=left), head[columns], right


def by_depth(counts: Tensor, decay: float, dtype: torch.dtype) -> Tensor:
    """w_u = decay^(u-1) over the labels that count (A, U) bool, normalised to a sum of one: (A, U)."""
    weights = counts * decay ** torch.arange(counts.shape[1], device=counts.device, dtype=dtype)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)


def mean_over_anchors(
    sums: Callable[..., tuple[Tensor, Tensor]],
    x: AnchoredFrames,
    output: Sequence[Tensor | None],
    size: int,
    divisor: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """The loss and the numbers that ``sums`` adds up (`chunked`), divided by the number of anchors with a label.

    A chunk has at most ``size`` anchors. The ``divisor`` is that of `TrainingBatch`.
    """
    loss, numbers = chunked(sums, x, output, size)
    num_anchors = divisor(x.valid[:, 0].sum())
    return loss / num_anchors, numbers / num_anchors
