"""How the base chooses a token from its logits: greedily, or by a draw that only the seed and the position decide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Sampler(Protocol):
    """Picks a token from each row of logits."""

    def pick(self, logits: Tensor, positions: Sequence[int]) -> list[int]:
        """One token for each row of (N, V); row i decides the token at absolute position ``positions[i]``."""


class Greedy:
    """The most probable token; of equals the first."""

    def pick(self, logits: Tensor, positions: Sequence[int]) -> list[int]:
        return logits.argmax(-1).tolist()


class KeyedSampler:
    """Draws from the processed distribution by inverse CDF, with a number keyed by (seed, position).

    Two runs with one seed give one text, whatever the drafter: sample-and-match emits the very draw the base alone
    would have made.

    Args:
        temperature: Above zero.
        top_k: Keep the k most probable tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens with this probability; 1 keeps all.
        seed: Key of the draws.
    """

    def __init__(self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0) -> None:
        from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        if temperature <= 0 or top_k < 0 or not 0 < top_p <= 1:
            raise ValueError(
                f"need temperature > 0, top_k >= 0 and 0 < top_p <= 1, not {temperature}, {top_k}, {top_p}"
            )
        self.seed = seed
        self._warpers = LogitsProcessorList()
        if temperature != 1.0:
            self._warpers.append(TemperatureLogitsWarper(float(temperature)))
        if top_k:
            self._warpers.append(TopKLogitsWarper(top_k))
        if top_p < 1.0:
            self._warpers.append(TopPLogitsWarper(top_p))

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distributions (N, V) that tokens are drawn from."""
        return self._warpers(None, logits.float()).double().softmax(-1)

    def pick(self, logits: Tensor, positions: Sequence[int]) -> list[int]:
        draws = torch.tensor([[self._draw(position)] for position in positions], dtype=torch.float64)
        cumulative = self.probabilities(logits).cumsum(-1)
        index = torch.searchsorted(cumulative, draws.to(logits.device) * cumulative[:, -1:], right=True)
        return index.clamp(max=logits.shape[-1] - 1)[:, 0].tolist()

    def _draw(self, position: int) -> float:
        return np.random.default_rng((self.seed, position)).random()
