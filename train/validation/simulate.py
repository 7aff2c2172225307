"""Decoding simulated on known text: what a base that writes this text would have accepted from a drafter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.protocol import BaseWeights, LearnedDrafter, Limits
from drafters.tree import DraftTree
from inference.verifier.base import Base


@dataclass(frozen=True)
class SimulatedStep:
    """One step of simulated decoding.

    Args:
        tree: The draft tree.
        num_accepted: Draft tokens that the base accepts.
        num_emitted: Tokens that the text grows by, bonus token included.
    """

    tree: DraftTree
    num_accepted: int
    num_emitted: int


def answer_spans(loss_mask: Sequence[int]) -> list[tuple[int, int]]:
    """Return the half-open ranges of consecutive assistant tokens."""
    spans: list[tuple[int, int]] = []
    start = None
    for position, is_answer in enumerate([*loss_mask, 0]):
        if is_answer and start is None:
            start = position
        elif not is_answer and start is not None:
            spans.append((start, position))
            start = None
    return spans


def draft_answer(
    drafter: LearnedDrafter,
    hidden: Tensor,
    input_ids: Tensor,
    span: tuple[int, int],
    base_weights: BaseWeights,
    eos: frozenset[int] = frozenset(),
) -> list[DraftTree]:
    """Draft a tree at every token of an answer but the last, which nothing follows.

    Args:
        drafter: The drafter.
        hidden: (S, F * D) hidden states of the base over the text.
        input_ids: (S,) the text.
        span: Half-open range of the answer.
        base_weights: The base's embedding and LM head.
        eos: Tokens that end a text.
    """
    start, end = span
    if end - start < 2:
        return []
    anchors = torch.arange(start, end - 1, device=input_ids.device)
    return drafter.draft_at(hidden, input_ids, anchors, base_weights, Limits(max_depth=end - start, eos=eos))


def simulated_steps(
    trees: Sequence[DraftTree], tokens: Sequence[int], span: tuple[int, int], max_nodes: int | None = None
) -> Iterator[SimulatedStep]:
    """Decode an answer with the trees that `draft_answer` drafted for it.

    If the base writes this text greedily, these are the steps of a session. The one difference: a session under a
    length cap makes its last trees less deep.

    Args:
        trees: A tree for each token of the answer but the last.
        tokens: The text.
        span: Half-open range of the answer. Its first token is the prefill's, which is no step.
        max_nodes: Use only this many nodes of each tree, the first ones; all if not given.
    """
    start, end = span
    root = start
    while root < end - 1:
        tree = trees[root - start]
        path = tree.follow(tokens[root + 1 : end])
        num_accepted = len(path) if max_nodes is None else sum(node < max_nodes for node in path)
        num_emitted = min(num_accepted + 1, end - 1 - root)
        yield SimulatedStep(tree, num_accepted, num_emitted)
        root += num_emitted


def simulate(
    drafter: LearnedDrafter,
    hidden: Tensor,
    input_ids: Tensor,
    span: tuple[int, int],
    base_weights: BaseWeights,
    eos: frozenset[int] = frozenset(),
) -> list[int]:
    """Return how many tokens each step emits on one answer; the arguments are those of `draft_answer`."""
    trees = draft_answer(drafter, hidden, input_ids, span, base_weights, eos)
    return [step.num_emitted for step in simulated_steps(trees, input_ids.tolist(), span)]


def simulate_answers(
    drafter: LearnedDrafter, base: Base, hidden: Tensor, input_ids: Tensor, loss_mask: Tensor
) -> Iterator[list[int]]:
    """Decode all answers of a batch, and yield for each of them how many tokens its steps emit.

    Args:
        drafter: The drafter.
        base: The base that the drafter drafts for.
        hidden: (B, S, F * D) hidden states of the base.
        input_ids: (B, S).
        loss_mask: (B, S), true on the tokens of the answers.
    """
    for states, tokens, mask in zip(hidden, input_ids, loss_mask.tolist(), strict=True):
        for span in answer_spans(mask):
            yield simulate(drafter, states, tokens, span, base.base_weights, base.eos)
