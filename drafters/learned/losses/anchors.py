"""Anchors: the training positions a draft starts from, and the labels that follow them."""

from __future__ import annotations

import torch
from torch import Tensor


def valid_positions(loss_mask: Tensor) -> Tensor:
    """(B, S) bool: positions whose next token is an assistant token, and before which something stands."""
    valid = torch.zeros_like(loss_mask)
    valid[:, :-1] = loss_mask[:, 1:]
    valid[:, 0] = False  # nothing stands before the first position
    return valid


def sample(loss_mask: Tensor, num_anchors: int) -> tuple[Tensor, Tensor]:
    """Draw anchors without replacement among positions whose next token is an assistant token.

    Args:
        loss_mask: (B, S) bool, true on assistant tokens.

    Returns:
        ``anchors`` (B, A), sorted, and ``kept`` (B, A) bool, false where a sequence has fewer valid positions.
        A is at most ``num_anchors`` and at least 1.
    """
    valid = valid_positions(loss_mask)
    most = int(valid.sum(1).max().clamp(1, num_anchors))
    scores = torch.rand(valid.shape, device=valid.device).masked_fill(~valid, -1.0)
    anchors = scores.topk(most, dim=1).indices.sort(1).values
    return anchors, valid.gather(1, anchors)


def following(labels: Tensor, loss_mask: Tensor, anchors: Tensor, num_labels: int) -> tuple[Tensor, Tensor]:
    """The base's next tokens y_1..y_U after each anchor, as far as the assistant's turn goes.

    Args:
        labels: (B, S) next token at each position. loss_mask: (B, S) bool. anchors: (B, A).

    Returns:
        ``targets`` (B, A, U) and ``valid`` (B, A, U) bool, true on a leading run.
    """
    num_positions = labels.shape[1]
    at = anchors[..., None] + torch.arange(num_labels, device=anchors.device)  # (B, A, U): label u stands at a + u
    inside = at + 1 < num_positions
    at = at.clamp(max=num_positions - 2)
    batch = torch.arange(len(labels), device=labels.device)[:, None, None]
    valid = (inside & loss_mask[batch, at + 1]).int().cumprod(-1).bool()
    return labels[batch, at], valid


def deciding(
    last: Tensor, input_ids: Tensor, labels: Tensor, anchors: Tensor, num_labels: int
) -> tuple[Tensor, Tensor]:
    """The base's states that decided the labels of each anchor: its law of y_u given the text up to y_{u-1}.

    Args:
        last: (B, S, D) normed last states. input_ids: (B, S). labels: (B, S). anchors: (B, A).

    Returns:
        ``states`` (B, A, U, D), and ``read`` (B, A, U) bool, true where the text before goes on with y_1..y_{u-1}: the
        base's law is that of another text where it does not.
    """
    at = anchors[..., None] + torch.arange(num_labels, device=anchors.device)  # (B, A, U): y_u is decided at a + u - 1
    inside = at < input_ids.shape[1]
    at = at.clamp(max=input_ids.shape[1] - 1)
    batch = torch.arange(len(last), device=last.device)[:, None, None]
    follows = (
        labels[batch, (at - 1).clamp(min=0)] == input_ids[batch, at]
    )  # (B, A, U): the text at a + u is y_u, from u = 1
    follows[..., 0] = True  # the root is decided already
    return last[batch, at], (follows & inside).int().cumprod(-1).bool()
