"""Training metrics that add up over batches and processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric


class AcceptanceLength(Metric):
    """Emitted tokens a step, bonus included, over all steps of all texts (micro average)."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("emitted", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("steps", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, emitted: list[int]) -> None:
        """Take the tokens each step of one text emitted."""
        self.emitted += sum(emitted)
        self.steps += len(emitted)

    def compute(self) -> Tensor:
        return self.emitted / self.steps.clamp(min=1)


class DepthAcceptance(Metric):
    """Share of steps that accept at least d draft tokens, for d = 1..depth.

    Args:
        depth: Deepest draft position counted.
    """

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.add_state("reached", torch.zeros(depth), dist_reduce_fx="sum")
        self.add_state("steps", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, accepted: list[int]) -> None:
        """Take the number of draft tokens each step accepted."""
        for count in accepted:
            self.reached[: min(count, len(self.reached))] += 1
        self.steps += len(accepted)

    def compute(self) -> Tensor:
        return self.reached / self.steps.clamp(min=1)


def conditional(shares: Sequence[float]) -> list[float]:
    """Share of the steps that accept at least d among those that accept at least d - 1; 0 where there are none.

    Args:
        shares: What `DepthAcceptance` computes, for d = 1, 2, ...
    """
    before = [1.0, *shares]
    return [share / above if above else 0.0 for share, above in zip(shares, before, strict=False)]
