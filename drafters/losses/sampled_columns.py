"""Losses over a sample of the vocabulary: the labels of a batch, and other tokens that stand for all the rest."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.losses.anchors import AnchoredFrames


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
