"""What a skip set is worth, without decoding: drafts made along the base's own texts, and what a draft costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from drafters.protocol import RequiredOutputs
from drafters.tree import DraftTree
from inference.engine.base import Base
from inference.engine.cache import make_cache
from inference.engine.layer_skipping import skipping, sublayers
from inference.engine.runner import Runner


class Probe:
    """Drafts along texts that the base wrote greedily, all of them in one forward for each skip set.

    At every ``stride``-th token of an answer a draft starts: its tokens see the base's own cache before the root and
    each other, as in decoding, so the tokens it would have had accepted are known and not estimated.

    Args:
        base: That wrote the texts.
        texts: (prompt, answer) pairs of token ids.
        num_draft: Tokens K a draft.
        stride: Tokens from root to root.

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
                f"every answer of {base.name} ends within {num_draft} tokens: lower num_draft, or ask other questions"
            )
        num_drafts = torch.tensor([1 + (len(answer) - 1 - num_draft) // stride for _, answer in texts])
        self.length = max(len(prompt) + len(answer) for prompt, answer in texts)
        whole = [[*prompt, *answer] for prompt, answer in texts]
        tokens = torch.tensor([text + text[-1:] * (self.length - len(text)) for text in whole])  # (B, S)
        column = torch.arange(int(num_drafts.max()) * num_draft)
        draft, depth = column // num_draft, column % num_draft
        roots = torch.tensor([len(prompt) for prompt, _ in texts])[:, None] + draft * stride  # (B, T)
        places = roots + depth
        self.real = (torch.arange(int(num_drafts.max())) < num_drafts[:, None]).to(device)  # (B, T / K)
        expected = tokens.gather(1, (places + 1).clamp(max=self.length - 1)).to(device)
        self.expected = expected.unflatten(1, (-1, num_draft))[self.real]  # (N, K)
        places = places.clamp(max=self.length - 1)
        sees_text = torch.arange(self.length) < roots[..., None]  # (B, T, S)
        sees_draft = (draft[:, None] == draft) & (depth[:, None] >= depth)
        sees = torch.cat([sees_text, sees_draft.expand(len(texts), -1, -1)], dim=-1)
        self.mask = torch.zeros(sees.shape, dtype=dtype).masked_fill_(~sees, torch.finfo(dtype).min)[:, None].to(device)
        self.fed, self.places = tokens.gather(1, places).to(device), places.to(device)
        self.cache = make_cache("dynamic", base.model.config)
        self.model(input_ids=tokens.to(device), past_key_values=self.cache, use_cache=True)

    @torch.inference_mode()
    def agrees(self, attention: Sequence[int], mlp: Sequence[int]) -> Tensor:
        """Which tokens of the N drafts are the base's own, as long as those before them are: (N, K) bool."""
        try:
            with skipping(self.model, attention, mlp):
                output = self.model(
                    input_ids=self.fed,
                    position_ids=self.places,
                    attention_mask=self.mask,
                    past_key_values=self.cache,
                    use_cache=True,
                )
        finally:
            self.cache.keep(self.length, [])
        states = output.last_hidden_state.unflatten(1, (-1, self.num_draft))[self.real]  # (N, K, D)
        return self.head(states).argmax(-1) == self.expected

    def survival(self, attention: Sequence[int], mlp: Sequence[int]) -> list[float]:
        """Share of the drafts whose first 1, 2, ... K tokens are all accepted."""
        return self.agrees(attention, mlp).cumprod(-1).double().mean(0).tolist()


def speed_up(survival: Sequence[float], cost: float) -> tuple[float, int]:
    """The predicted speed-up at the best draft length k, and k: (1 + E[accepted]) tokens a step over its cost 1 + k c.

    A step of the base counts 1 whatever it is fed, as on hardware that waits for the weights.

    Args:
        survival: Share of the drafts whose first 1, 2, ... tokens are all accepted.
        cost: c, a drafting forward in base forwards.
    """
    accepted, best = 0.0, (0.0, 0)
    for length, share in enumerate(survival, start=1):
        accepted += share
        best = max(best, ((1 + accepted) / (1 + length * cost), length), key=lambda found: found[0])
    return best


def parameter_shares(base: Base) -> list[float]:
    """Each of the 2L sublayers' share of the parameters that a one-token forward reads; the head reads the rest."""
    attentions, mlps = sublayers(base.model.base_model)
    sizes = [sum(weight.numel() for weight in sublayer.parameters()) for sublayer in (*attentions, *mlps)]
    total = sum(sizes) + base.model.get_output_embeddings().weight.numel()
    return [size / total for size in sizes]


def measured_shares(base: Base, prompt: Sequence[int], repeats: int = 15) -> list[float]:
    """What each of the 2L sublayers has of the time of a one-token forward here: medians with all and with none on."""
    runner = Runner(base)
    num_layers = len(sublayers(runner.model)[0])
    every, nothing = tuple(range(num_layers)), ()
    runner.forward(prompt, DraftTree(), RequiredOutputs())
    runner.commit([])

    def seconds(attention: Sequence[int], mlp: Sequence[int]) -> float:
        times = []
        with skipping(runner.model, attention, mlp):
            for _ in range(repeats):
                started = time.perf_counter()
                runner.forward_uncommitted(prompt[-1:], runner.cached).argmax().item()
                times.append(time.perf_counter() - started)
                runner.rollback()
        return statistics.median(times)

    whole = seconds(nothing, nothing)
    shares = [max(0.0, 1 - less / whole) / num_layers for less in (seconds(every, nothing), seconds(nothing, every))]
    return [shares[0]] * num_layers + [shares[1]] * num_layers


def draft_cost(shares: Sequence[float], skips: Collection[int]) -> float:
    """A drafting forward in base forwards."""
    return max(0.01, 1 - sum(shares[sublayer] for sublayer in sorted(skips)))
