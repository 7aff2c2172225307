"""Validation: decoding simulated on held-out text, which measures the acceptance length while a drafter is trained."""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchmetrics import Metric

from data.batches import collate
from drafters.protocol import BaseWeights, LearnedDrafter, Limits
from drafters.tree import DraftTree
from inference.verifier.base import Base

Answers = Literal["greedy", "text"]


class Acceptance(Metric):
    """Tokens per step and accepted draft tokens up to a depth, over all steps of all answers and processes."""

    emitted: Tensor
    steps: Tensor
    reached: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("emitted", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("steps", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("reached", torch.zeros(8), dist_reduce_fx="sum")  # depths 1 to 8

    def update(self, emitted: Sequence[int]) -> None:
        """Add the number of tokens that each step of one answer emitted, bonus token included."""
        self.emitted += sum(emitted)
        self.steps += len(emitted)
        for count in emitted:
            self.reached[: count - 1] += 1

    def compute(self) -> tuple[Tensor, Tensor]:
        """Return the acceptance length, and the share of steps that accept at least d draft tokens, d = 1, 2, ...

        All are 0 if there were no steps.
        """
        steps = self.steps.clamp(min=1)
        return self.emitted / steps, self.reached / steps


# ---- the text


def answer_spans(loss_mask: Sequence[int]) -> list[tuple[int, int]]:
    """Return the half-open ranges of consecutive assistant tokens."""
    edges = np.flatnonzero(np.diff(np.array([0, *loss_mask, 0], dtype=int))).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


@torch.no_grad()
def with_own_answers(base: Base, batch: dict[str, Tensor], max_tokens: int) -> dict[str, Tensor]:
    """Replace everything after the first prompt of each conversation by the base's own greedy answer.

    Validation then decodes what the base would really write. All answers may be equally long, at most half of the
    context, so that no answer depends on the other prompts of its batch. Prompts that leave less room are left out and
    counted on the terminal. If none leaves enough, the shortest one is answered up to the end of the context. Raises
    ValueError if all prompts fill the base's context.

    Takes ``input_ids`` (B, S) and ``loss_mask`` (B, S), and returns the same keys on the CPU, padded on the right.
    Conversations without an answer are left out.
    """
    prompts = [
        ids[: spans[0][0]]
        for ids, mask in zip(batch["input_ids"], batch["loss_mask"].tolist(), strict=True)
        if (spans := answer_spans(mask))
    ]
    # One call for all rows: where the base is sharded, every process makes as many calls as the others.
    max_new_tokens = min(max_tokens, base.context_length // 2)
    fitting = [prompt for prompt in prompts if len(prompt) + max_new_tokens <= base.context_length]
    if num_left_out := len(prompts) - max(1, len(fitting)):
        print(
            f"validation leaves out {num_left_out} of {len(prompts)} prompts of a batch: they leave less than "
            f"{max_new_tokens} tokens of the context of {base.name}",
            flush=True,
        )
    prompts = fitting or [min(prompts, key=len)]
    width = max(map(len, prompts))
    max_new_tokens = min(max_new_tokens, base.context_length - width)
    if max_new_tokens < 1:
        raise ValueError(
            f"a held-out prompt has {width} tokens and the context of {base.name} ends at {base.context_length}: "
            "lower data.max_length, or set model.val_answers to text"
        )
    padded = pad_sequence(prompts, batch_first=True, padding_side="left")
    is_token = pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True, padding_side="left")
    with torch.autocast(padded.device.type, enabled=False):
        answers = base.greedy(padded, is_token, max_new_tokens)
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        length = next((end for end, token in enumerate(answer.tolist(), 1) if token in base.eos), len(answer))
        text = torch.cat([prompt, answer[:length]]).cpu()
        rows.append({"input_ids": text, "loss_mask": torch.arange(len(text)) >= len(prompt)})
    return collate(rows)


# ---- the simulation


def draft_answer(
    drafter: LearnedDrafter,
    hidden: Tensor,
    input_ids: Tensor,
    span: tuple[int, int],
    base_weights: BaseWeights,
    eos: frozenset[int],
) -> list[DraftTree]:
    """Draft a tree at every token of an answer but the last, which nothing follows.

    The hidden states of the base over the text are (S, F * D), the text (S,); ``span`` is the half-open range of the
    answer, and ``eos`` are the tokens that end a text.
    """
    start, end = span
    if end - start < 2:
        return []
    anchors = torch.arange(start, end - 1, device=input_ids.device)
    return drafter.draft_at(hidden, input_ids, anchors, base_weights, Limits(max_depth=end - start, eos=eos))


def simulated_steps(
    trees: Sequence[DraftTree], tokens: Sequence[int], span: tuple[int, int]
) -> Iterator[tuple[DraftTree, int]]:
    """Decode an answer with the trees that `draft_answer` drafted for it: yield each step's tree and emitted tokens.

    If the base writes this text greedily, these are the steps of a session. The one difference: a session under a
    length cap makes its last trees less deep. The first token of ``span``, the half-open range of the answer, is the
    prefill's, which is no step.
    """
    start, end = span
    root = start
    while root < end - 1:
        tree = trees[root - start]
        num_emitted = min(len(tree.follow(tokens[root + 1 : end])) + 1, end - 1 - root)
        yield tree, num_emitted
        root += num_emitted


def simulate_answers(
    drafter: LearnedDrafter, base: Base, hidden: Tensor, input_ids: Tensor, loss_mask: Tensor
) -> Iterator[list[int]]:
    """Decode all answers of a batch, and yield for each of them how many tokens each step emits.

    The hidden states of the base are (B, S, F * D), the ids and the mask, which is true on the answers, (B, S).
    """
    for states, tokens, mask in zip(hidden, input_ids, loss_mask.tolist(), strict=True):
        for span in answer_spans(mask):
            trees = draft_answer(drafter, states, tokens, span, base.base_weights, base.eos)
            yield [num_emitted for _, num_emitted in simulated_steps(trees, tokens.tolist(), span)]
