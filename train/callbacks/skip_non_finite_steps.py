"""Skips optimizer steps whose loss or gradient is not finite, and counts batches that teach nothing."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from drafters.losses.anchors import valid_positions
from train.optimizer import is_accumulating


class SkipNonFiniteSteps(L.Callback):
    """Skips optimizer steps whose loss or gradient is not finite; counts them and the batches without anchors.

    A skipped step leaves the weights and the optimizer as they were. It counts as a step, and the learning rate
    schedule advances. The gradients are checked after the processes have averaged them, so all processes skip the
    same steps. Under DeepSpeed, which gives no access to the gradients, nothing is skipped.

    Args:
        max_skipped: Number of consecutive steps that may be skipped; one more ends the run.
    """

    def __init__(self, max_skipped: int = 20) -> None:
        if max_skipped < 0:
            raise ValueError(f"faults.max_skipped must be at least 0, not {max_skipped}")
        self.max_skipped = max_skipped
        self.skipped_steps = self.skipped_in_a_row = self.empty_batches = 0
        # Batches of this process without anchors since the counts of the processes were last added up.
        self._num_empty: Tensor | None = None

    @property
    def state_key(self) -> str:
        return "Faults"  # the name under which checkpoints have always held these counts

    def state_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("skipped_steps", "skipped_in_a_row", "empty_batches")}

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if isinstance(batch, dict) and "loss_mask" in batch:
            is_empty = (~valid_positions(batch["loss_mask"]).any()).long()
            self._num_empty = is_empty if self._num_empty is None else self._num_empty + is_empty

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        value = loss.detach()
        # NaN if the loss is not finite: then all gradients become NaN, and after averaging those of all processes.
        one = 1 + (value - value)
        loss.register_hook(lambda gradient: gradient * one)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if torch.isfinite(total_norm(gradients)):
            self.skipped_in_a_row = 0
            return
        optimizer.zero_grad(set_to_none=True)  # without gradients, the step changes neither weights nor its own state
        self.skipped_steps += 1
        self.skipped_in_a_row += 1

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if is_accumulating(trainer):
            return
        if self._num_empty is not None:
            self.empty_batches += int(trainer.strategy.reduce(self._num_empty, reduce_op="sum"))
            self._num_empty = None
        pl_module.log("train/skipped_steps", float(self.skipped_steps))
        pl_module.log("train/empty_batches", float(self.empty_batches))
        if self.skipped_in_a_row > self.max_skipped:
            raise ValueError(
                f"{self.skipped_in_a_row} steps in a row, up to step {trainer.global_step}, had a loss or gradient "
                "that is not finite: lower model.learning_rate, clip with trainer.gradient_clip_val, or train with "
                "trainer.precision 32-true"
            )


def total_norm(gradients: list[Tensor]) -> Tensor:
    """Return the norm of all gradients together, also of gradients that FSDP2 shards."""
    norm = nn.utils.get_total_norm(gradients)
    # The norm of sharded gradients is a DTensor, whose full value is the same on all processes.
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
