"""The optimizer and learning rate schedule of all training modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import nn

from train.muon import Muon
from train.strategies import FSDP2, is_deepspeed

Schedule = Literal["constant", "cosine"]
OptimizerName = Literal["adamw", "muon"]


def adamw(
    module: L.LightningModule, learning_rate: float, weight_decay: float, warmup_steps: int, schedule: Schedule
) -> OptimizerLRSchedulerConfig:
    """AdamW with a linear warm-up, then a constant learning rate or a cosine decay to zero at the last step.

    Weight decay is applied to matrices only, not to biases, norms and other vectors.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return with_schedule(module, _adamw(trained, learning_rate, weight_decay), warmup_steps, schedule)


def muon(
    module: L.LightningModule, learning_rate: float, weight_decay: float, warmup_steps: int, schedule: Schedule
) -> OptimizerLRSchedulerConfig:
    """Muon for the weights of linear layers and AdamW for all others, with the schedule of `adamw`.

    Updates are scaled to the size that AdamW's typically have, so one learning rate serves both (Moonlight, arXiv
    2502.16982); the best one may differ from that of AdamW alone. Output layers over the vocabulary, embeddings and
    vectors are trained by AdamW. A module whose own parameters are linear maps, too, names them in ``linear_maps``.

    Raises:
        ValueError: The strategy shards the matrices that Muon needs whole.
    """
    if isinstance(module.trainer.strategy, FSDP2) or is_deepspeed(module.trainer):
        raise ValueError("optimizer muon needs whole matrices, which FSDP and DeepSpeed shard: use adamw, or DDP")
    linear = {id(weight) for layer in module.modules() for weight in _linear_maps(layer)}
    inner: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            (inner if id(parameter) in linear and "lm_head" not in name else others).append(parameter)
    together = JointOptimizer(Muon(inner, learning_rate, weight_decay), _adamw(others, learning_rate, weight_decay))
    return with_schedule(module, together, warmup_steps, schedule)


def _linear_maps(layer: nn.Module) -> list[nn.Parameter]:
    """The matrices of a layer that multiply its input."""
    names = ("weight",) if isinstance(layer, nn.Linear) else getattr(layer, "linear_maps", ())
    return [getattr(layer, name) for name in names]


OPTIMIZERS: dict[OptimizerName, Callable[..., OptimizerLRSchedulerConfig]] = {"adamw": adamw, "muon": muon}


class JointOptimizer(torch.optim.Optimizer):
    """Several optimizers that Lightning and learning rate schedules see as one.

    They share their parameter groups and their state with it.

    Args:
        optimizers: Optimizers of different parameters.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self._share()

    def _share(self) -> None:
        start = 0
        for optimizer in self.optimizers:
            end = start + len(optimizer.param_groups)
            optimizer.state, optimizer.param_groups = self.state, self.param_groups[start:end]
            start = end

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call the closure once, then take a step with each optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()


def _adamw(parameters: list[nn.Parameter], learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def with_schedule(
    module: L.LightningModule, optimizer: torch.optim.Optimizer, warmup_steps: int, schedule: Schedule
) -> OptimizerLRSchedulerConfig:
    """An optimizer with a linear warm-up, then a constant learning rate or a cosine decay to zero at the last step.

    Raises:
        ValueError: The schedule is ``cosine``, and the training has no last step, as it is limited by time alone.
    """
    num_steps = max(1, module.trainer.estimated_stepping_batches)
    if schedule == "cosine" and math.isinf(num_steps):
        raise ValueError(
            "schedule cosine needs the number of steps, which trainer.max_time does not give: "
            "give trainer.max_steps or trainer.max_epochs too, or take model.schedule constant"
        )

    def factor(step: int) -> float:
        warm_up = min(1.0, (step + 1) / max(1, warmup_steps))
        progress = min(1.0, step / num_steps)
        return warm_up * (0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def is_accumulating(trainer: L.Trainer) -> bool:
    """Whether the gradients of the running batch are only accumulated, so that no optimizer step follows it."""
    return trainer.fit_loop._should_accumulate()
