"""Predict the speed-up of a skip set without decoding, from drafts along the base's own texts and their cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from drafters.protocol import RequiredOutputs
from drafters.tree import DraftTree
from inference.verifier.base import Base
from inference.verifier.cache import BufferCache
from inference.verifier.layer_skipping import sublayers, without_sublayers
from inference.verifier.layers import cache_argument
from inference.verifier.runner import Runner


class Probe:
    """Drafts along texts that the base wrote greedily, all in a single forward for each skip set.

    A draft starts at every ``stride``-th token of an answer. As in decoding, its tokens attend to the whole base's
    cache up to the root and to each other, so the number of tokens that would be accepted is exact, not an estimate.

    Args:
        base: The base that wrote the texts.
        texts: (prompt, answer) pairs of token ids.
        num_draft: Number of tokens K of a draft.
        stride: Distance in tokens between the roots of two drafts.

    Raises:
        ValueError: No answer is longer than a draft.
    """

    @torch.inference_mode()
    def __init__(self, base: Base, texts: Sequence[tuple[list[int], list[int]]], num_draft: int, stride: int) -> None:
        self.model, self.head, self.num_draft = base.model.base_model, base.model.get_output_embeddings(), num_draft
        device, dtype = base.model.device, base.model.dtype
        texts = [(prompt, answer) for prompt, answer in texts if len(answer) > num_draft]
        if not texts:
            raise ValueError(
                f"every answer of {base.name} ends within {num_draft} tokens: lower num_draft, or choose other "
                "questions"
            )
        num_drafts = torch.tensor([1 + (len(answer) - 1 - num_draft) // stride for _, answer in texts])
        self.length = max(len(prompt) + len(answer) for prompt, answer in texts)
        rows = [[*prompt, *answer] for prompt, answer in texts]
        tokens = torch.tensor([row + row[-1:] * (self.length - len(row)) for row in rows])  # (B, S)
        column = torch.arange(int(num_drafts.max()) * num_draft)
        draft, depth = column // num_draft, column % num_draft
        roots = torch.tensor([len(prompt) for prompt, _ in texts])[:, None] + draft * stride  # (B, T)
        positions = roots + depth
        self.is_draft = (torch.arange(int(num_drafts.max())) < num_drafts[:, None]).to(device)  # (B, T / K)
        expected = tokens.gather(1, (positions + 1).clamp(max=self.length - 1)).to(device)
        self.expected = expected.unflatten(1, (-1, num_draft))[self.is_draft]  # (N, K)
        positions = positions.clamp(max=self.length - 1)
        attends_text = torch.arange(self.length) < roots[..., None]  # (B, T, S)
        attends_draft = (draft[:, None] == draft) & (depth[:, None] >= depth)
        attends = torch.cat([attends_text, attends_draft.expand(len(texts), -1, -1)], dim=-1)
        self.mask = (
            torch.zeros(attends.shape, dtype=dtype).masked_fill_(~attends, torch.finfo(dtype).min)[:, None].to(device)
        )
        self.fed, self.positions = tokens.gather(1, positions).to(device), positions.to(device)
        self.cache = BufferCache(base.model.config.num_hidden_layers)
        self.cached = cache_argument(self.model, self.cache)
        self.model(input_ids=tokens.to(device), use_cache=True, **self.cached)

    @torch.inference_mode()
    def agrees(self, attention: Sequence[int], mlp: Sequence[int]) -> Tensor:
        """Return (N, K) bool: which draft tokens equal the base's, valid while all tokens before them do."""
        try:
            output = without_sublayers(self.model, attention, mlp)(
                input_ids=self.fed,
                position_ids=self.positions,
                attention_mask=self.mask,
                use_cache=True,
                **self.cached,
            )
        finally:
            self.cache.keep(self.length, [])
        states = output.last_hidden_state.unflatten(1, (-1, self.num_draft))[self.is_draft]  # (N, K, D)
        return self.head(states).argmax(-1) == self.expected

    def survival(self, attention: Sequence[int], mlp: Sequence[int]) -> list[float]:
        """Return the shares of drafts whose first 1, 2, ... K tokens are all accepted."""
        return self.agrees(attention, mlp).cumprod(-1).double().mean(0).tolist()


def speed_up(survival: Sequence[float], cost: float) -> tuple[float, int]:
    """Return the predicted speed-up at the best draft length k, and k.

    A step emits 1 + E[accepted] tokens and costs 1 + k c base forwards: reading the draft costs the base nothing
    extra, as on hardware that is limited by reading the weights.

    Args:
        survival: Shares of drafts whose first 1, 2, ... tokens are all accepted.
        cost: Cost c of a draft token in base forwards.
    """
    accepted, best = 0.0, (0.0, 0)
    for length, share in enumerate(survival, start=1):
        accepted += share
        best = max(best, ((1 + accepted) / (1 + length * cost), length), key=lambda candidate: candidate[0])
    return best


def parameter_shares(base: Base) -> list[float]:
    """Return the share of each of the 2L sublayers in the parameters that a forward of one token reads.

    The LM head has the remaining share.
    """
    attentions, mlps = sublayers(base.model.base_model)
    sizes = [sum(weight.numel() for weight in sublayer.parameters()) for sublayer in (*attentions, *mlps)]
    total = sum(sizes) + base.model.get_output_embeddings().weight.numel()
    return [size / total for size in sizes]


def measured_shares(base: Base, prompt: Sequence[int], repeats: int = 15) -> list[float]:
    """Return the share of each of the 2L sublayers in the time of a forward of one token on this machine.

    It compares median times with no sublayer, all attentions, and all MLPs skipped.
    """
    runner = Runner(base)
    num_layers = len(sublayers(runner.model)[0])
    every: tuple[int, ...] = tuple(range(num_layers))
    nothing: tuple[int, ...] = ()
    runner.forward(prompt, DraftTree(), RequiredOutputs())
    runner.commit([])

    def seconds(attention: Sequence[int], mlp: Sequence[int]) -> float:
        times = []
        model = without_sublayers(runner.model, attention, mlp)
        for _ in range(repeats):
            started = time.perf_counter()
            runner.forward_uncommitted(prompt[-1:], runner.cached, model).argmax().item()
            times.append(time.perf_counter() - started)
            runner.rollback()
        return statistics.median(times)

    full = seconds(nothing, nothing)
    attention, mlp = (
        max(0.0, 1 - skipped / full) / num_layers for skipped in (seconds(every, nothing), seconds(nothing, every))
    )
    return [attention] * num_layers + [mlp] * num_layers


def draft_cost(shares: Sequence[float], skips: Collection[int]) -> float:
    """Return the cost of a draft token in base forwards."""
    return max(0.01, 1 - sum(shares[sublayer] for sublayer in sorted(skips)))
