"""Muon, an optimizer for matrices whose updates change all directions of a matrix alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315
"""Coefficients of the quintic iteration, chosen for a steep slope at zero (Jordan 2024)."""


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, as the update of each matrix (Jordan 2024).

    Updates are scaled by 0.2 sqrt(max(rows, columns)), to the size that those of AdamW have (Moonlight, arXiv
    2502.16982, section 2.2). This is `torch.optim.Muon` but for two things: it runs on PyTorch before 2.9, and
    multiplies in float32 on a CPU, as many have no instructions for bfloat16.

    Args:
        params: Matrices.
        lr: Learning rate.
        weight_decay: Weight decay, decoupled as in AdamW.
        momentum: Share of the momentum that is kept at each step.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.1, momentum: float = 0.95
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; a closure is called first, with gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight.grad)
                average = state["momentum_buffer"].lerp_(weight.grad, 1 - momentum)
                update = orthogonalised(weight.grad.lerp(average, momentum))
                weight.mul_(1 - rate * group["weight_decay"])
                weight.add_(update, alpha=-rate * 0.2 * math.sqrt(max(weight.shape)))
        return loss


def orthogonalised(matrix: Tensor, num_steps: int = 5) -> Tensor:
    """The matrix with its singular values moved close to one, by Newton-Schulz iterations.

    They end between 0.6 and 1.3, but for those below about a thousandth of the matrix's norm.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrix.to(_working_dtype(matrix.device))
    x = x.T if len(matrix) > matrix.shape[1] else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if len(matrix) > matrix.shape[1] else x).to(matrix.dtype)


def _working_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16
