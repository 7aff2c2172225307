"""The optimizer and learning rate schedule of all training modules."""

from __future__ import annotations

import math
from typing import Literal

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig

Schedule = Literal["constant", "cosine"]


def adamw(
    module: L.LightningModule, learning_rate: float, weight_decay: float, warmup_steps: int, schedule: Schedule
) -> OptimizerLRSchedulerConfig:
    """AdamW with a linear warm-up, then a constant learning rate or a cosine decay to zero at the last step.

    Weight decay is applied to matrices only, not to biases, norms and other vectors.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
    num_steps = max(1, int(module.trainer.estimated_stepping_batches))

    def factor(step: int) -> float:
        warm_up = min(1.0, (step + 1) / max(1, warmup_steps))
        progress = min(1.0, step / num_steps)
        return warm_up * (0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def is_accumulating(trainer: L.Trainer) -> bool:
    """Whether the gradients of the running batch are only accumulated, so that no optimizer step follows it."""
    return trainer.fit_loop._should_accumulate()
