"""Decoding simulated on a text the base is taken to have written: what a drafter would have been accepted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.protocol import BaseWeights, LearnedDrafter, Limits
from drafters.tree import DraftTree


def accepted(tree: DraftTree, continuation: Sequence[int]) -> int:
    """Return how many draft tokens are accepted if the base's own text goes on with ``continuation``."""
    return len(tree.follow(continuation))


def answer_spans(loss_mask: Sequence[int]) -> list[tuple[int, int]]:
    """The half-open ranges of assistant tokens."""
    spans, start = [], None
    for position, inside in enumerate([*loss_mask, 0]):
        if inside and start is None:
            start = position
        elif not inside and start is not None:
            spans.append((start, position))
            start = None
    return spans


def simulate(
    drafter: LearnedDrafter,
    hidden: Tensor,
    input_ids: Tensor,
    span: tuple[int, int],
    base_weights: BaseWeights,
    eos: frozenset[int] = frozenset(),
) -> list[int]:
    """Tokens that each step emits on one answer, its first token (the prefill's) not counted.

    This is what the session does on a text that is the base's own greedy one: a step at root r emits the accepted
    path and the next token, never past the end. Only a length cap is not known here: the session's last trees before
    it are less deep.

    Args:
        hidden: (S, F * D). input_ids: (S,). span: Where the answer stands.
        borrowed: The base's embedding and head.
        eos: Tokens that end a text.
    """
    start, end = span
    if end - start < 2:
        return []
    anchors = torch.arange(start, end - 1, device=input_ids.device)
    trees = drafter.draft_at(hidden, input_ids, anchors, base_weights, Limits(max_depth=end - start, eos=eos))
    tokens, steps, root = input_ids.tolist(), [], start
    while root < end - 1:
        emitted = min(accepted(trees[root - start], tokens[root + 1 : end]) + 1, end - 1 - root)
        steps.append(emitted)
        root += emitted
    return steps
