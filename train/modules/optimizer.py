"""The optimizer and schedule that every module here trains with."""

from __future__ import annotations

import math
from typing import Literal

import lightning as L
import torch

Schedule = Literal["constant", "cosine"]


def adamw(module: L.LightningModule, learning_rate: float, weight_decay: float, warmup_steps: int, schedule: Schedule):
    """AdamW with decay on matrices only, linear warm-up, then a constant rate or a cosine to zero at the last step."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    others = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
    steps = max(1, int(module.trainer.estimated_stepping_batches))

    def factor(step: int) -> float:
        warm = min(1.0, (step + 1) / max(1, warmup_steps))
        progress = min(1.0, step / steps)
        return warm * (0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
