"""Validation metrics that add up over batches and processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric


class AcceptanceLength(Metric):
    """Tokens emitted per step, bonus token included, over all steps of all answers (micro average)."""

    emitted: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("emitted", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("steps", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, emitted: Sequence[int]) -> None:
        """Add the number of tokens that each step of one answer emitted."""
        self.emitted += sum(emitted)
        self.steps += len(emitted)

    def compute(self) -> Tensor:
        """Return the acceptance length, or 0 if there were no steps."""
        return self.emitted / self.steps.clamp(min=1)


class DepthAcceptance(Metric):
    """Share of steps that accept at least d draft tokens, for d = 1..depth.

    Args:
        depth: Largest d that is counted.
    """

    reached: Tensor
    steps: Tensor

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.add_state("reached", torch.zeros(depth), dist_reduce_fx="sum")
        self.add_state("steps", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, accepted: Sequence[int]) -> None:
        """Add the number of draft tokens that each step of one answer accepted."""
        for count in accepted:
            self.reached[: min(count, len(self.reached))] += 1
        self.steps += len(accepted)

    def compute(self) -> Tensor:
        """Return the shares for d = 1, 2, ..., each 0 if there were no steps."""
        return self.reached / self.steps.clamp(min=1)


def conditional(shares: Sequence[float]) -> list[float]:
    """Share of steps that accept at least d tokens among those that accept at least d - 1, or 0 if there are none.

    Args:
        shares: Result of `DepthAcceptance` for d = 1, 2, ...
    """
    before = [1.0, *shares]
    return [share / above if above else 0.0 for share, above in zip(shares, before, strict=False)]
