"""CTC alignments: the map from frames to text, and the probability of a text summed over its alignments."""

from __future__ import annotations

import torch
from torch import Tensor

IMPOSSIBLE = -1e30
"""Log-probability of what cannot happen; finite, so that gradients through logaddexp stay finite."""


def collapse(frames: Tensor, blank: int) -> list[int]:
    """Merge repeated frames, then drop blanks (the CTC paper's beta inverse, section 2.3).

    >>> collapse(torch.tensor([7, 7, 0, 7, 5]), blank=0)
    [7, 7, 5]
    """
    return [token for token in frames.unique_consecutive().tolist() if token != blank]


def prefix_log_probs(label_log_probs: Tensor, blank_log_probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities that T frames collapse to, or begin with, each prefix of a label (Graves 2006, section 4.1).

    With b_t(g) and n_t(g) the probability that frames 1..t collapse to g and end in blank or in g's last token,
    and enter_t(g.c) = p_t(c) * [b_{t-1}(g) + (c != last(g)) * n_{t-1}(g)]:

        n_t(g.c) = p_t(c) * n_{t-1}(g.c) + enter_t(g.c)
        b_t(g)   = p_t(blank) * (b_{t-1}(g) + n_{t-1}(g))
        P(text begins with g.c) = sum_t enter_t(g.c)

    Args:
        label_log_probs: (A, T, U) log p_t(y_u).
        blank_log_probs: (A, T) log p_t(blank).
        labels: (A, U) token ids; only their equality to the left neighbour matters.

    Returns:
        ``exact`` (A, U + 1), log P(the text is y_1..y_u) for u = 0..U, and ``prefix`` (A, U), log P(the text
        begins with y_1..y_u) for u = 1..U. What no alignment reaches is at most ``IMPOSSIBLE`` / 2.
    """
    num_anchors, num_frames, num_labels = label_log_probs.shape
    repeats = torch.zeros_like(labels, dtype=torch.bool)
    repeats[:, 1:] = labels[:, 1:] == labels[:, :-1]
    impossible = label_log_probs.new_full((num_anchors, num_labels), IMPOSSIBLE)

    blank_end = label_log_probs.new_full((num_anchors, num_labels + 1), IMPOSSIBLE)
    blank_end[:, 0] = 0.0
    label_end, prefix = impossible, impossible
    for frame in range(num_frames):
        parent_label_end = torch.cat([impossible[:, :1], label_end[:, :-1]], dim=1)  # (A, U): n_{t-1}(g)
        reachable = torch.where(repeats, impossible, parent_label_end)
        enter = label_log_probs[:, frame] + torch.logaddexp(blank_end[:, :-1], reachable)
        stay_blank = torch.cat([blank_end[:, :1], torch.logaddexp(blank_end[:, 1:], label_end)], dim=1)
        label_end = torch.logaddexp(label_log_probs[:, frame] + label_end, enter)
        blank_end = blank_log_probs[:, frame, None] + stay_blank
        prefix = torch.logaddexp(prefix, enter)
    exact = torch.cat([blank_end[:, :1], torch.logaddexp(blank_end[:, 1:], label_end)], dim=1)
    return exact, prefix
