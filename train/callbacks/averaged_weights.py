"""Averages the drafter's weights over the training steps; validation and checkpoints use the averages."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from train.strategies import FSDP2, is_deepspeed

Tensors = tuple[Tensor, ...] | list[Tensor]


class AveragedWeights(WeightAveraging):
    """Exponential moving average of the drafter's weights (EMA), a Lightning callback for ``trainer.callbacks``.

    Validation measures the averaged weights, checkpoints hold them as ``state_dict``, so they are what is exported, and
    training ends with them. The weights that a resumed run continues with are in the checkpoint too. Unlike Lightning's
    own EMA it makes no copy of the frozen base, and the first steps, whose weights are still close to the random ones,
    are forgotten quickly.

    Args:
        decay: Weight of the average so far at each step, at most. After n steps it is at most (1 + n) / (10 + n).
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be at least 0 and below 1, not {decay}")
        super().__init__(use_buffers=False)  # buffers are copied: some hold token ids
        self.decay = decay
        self._is_swapped = False  # whether the module holds the averages, and the average model the module's weights

    def _average(self, averaged: Tensors, current: Tensors, num_averaged: Tensor | int) -> None:
        count = int(num_averaged)  # waits for the device: once for all weights
        decay = min(self.decay, (1 + count) / (10 + count))
        torch._foreach_lerp_(averaged, current, 1 - decay)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if isinstance(trainer.strategy, FSDP2) or is_deepspeed(trainer):
            raise ValueError("AveragedWeights needs whole weights, which FSDP and DeepSpeed shard: train with DDP")
        base = vars(pl_module).pop("base", None)  # frozen and not a submodule: the copy needs none
        self._average_model = AveragedModel(pl_module, trainer.strategy.root_device, multi_avg_fn=self._average)
        if base is not None:
            vars(pl_module)["base"] = base
        self._is_swapped, self._latest_update_step = False, trainer.global_step  # also of an earlier training

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Copy the buffers again: the module may have filled them in its own setup, after the copy was made."""
        assert self._average_model is not None
        for copied, buffer in zip(self._average_model.module.buffers(), pl_module.buffers(), strict=True):
            copied.copy_(buffer)

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:  # otherwise the module has the averages already
            super().on_validation_epoch_start(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            super().on_validation_epoch_end(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any, **kwargs: Any) -> None:
        self._update(trainer, pl_module)

    def _update(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step > self._latest_update_step and not self._is_swapped:
            assert self._average_model is not None
            self._average_model.update_parameters(pl_module)
            self._latest_update_step = trainer.global_step

    def _swap_models(self, pl_module: L.LightningModule) -> None:
        super()._swap_models(pl_module)
        self._is_swapped = not self._is_swapped

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End with the averages, and keep the weights: a checkpoint may still be saved, from which training goes on."""
        if self._average_model is not None and not self._is_swapped:
            self._swap_models(pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the averages of all steps, also when another callback saves before this one has seen the last step."""
        if self._average_model is not None:
            self._update(trainer, pl_module)
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self._is_swapped:  # a signal ends the run in its validation
            weights, averages = "current_model_state", "state_dict"
            checkpoint[weights], checkpoint[averages] = checkpoint[averages], checkpoint[weights]
