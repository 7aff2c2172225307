"""Training steps that teach nothing: what is not finite is skipped, what is empty is counted."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from drafters.learned.losses.anchors import valid_positions


class Faults(L.Callback):
    """Skips optimizer steps whose loss or gradient is not finite, and counts them and the batches without anchors.

    A skipped step leaves weights and optimizer as they were; it counts as a step, and the schedule goes on. Gradients
    are looked at after the processes have exchanged theirs, so all of them skip the same steps. Under DeepSpeed, which
    keeps the gradients to itself, nothing is skipped.

    Args:
        max_skipped: Steps in a row that may be skipped; one more ends the run.
    """

    def __init__(self, max_skipped: int = 20) -> None:
        if max_skipped < 0:
            raise ValueError(f"faults.max_skipped must be at least 0, not {max_skipped}")
        self.max_skipped = max_skipped
        self.skipped_steps = self.skipped_in_a_row = self.empty_batches = 0
        self._empty: Tensor | None = None  # batches of this process without anchors, since they were last added up

    def state_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("skipped_steps", "skipped_in_a_row", "empty_batches")}

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if isinstance(batch, dict) and "loss_mask" in batch:
            is_empty = (~valid_positions(batch["loss_mask"]).any()).long()
            self._empty = is_empty if self._empty is None else self._empty + is_empty

    def on_before_backward(self, trainer: L.Trainer, module: L.LightningModule, loss: Tensor) -> None:
        value = loss.detach()
        one = 1 + (value - value)  # NaN where the loss is not finite, and so are then all gradients, in all processes
        loss.register_hook(lambda gradient: gradient * one)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if torch.isfinite(_norm(gradients)):
            self.skipped_in_a_row = 0
            return
        optimizer.zero_grad(set_to_none=True)  # the step that follows finds nothing to do, in its own state neither
        self.skipped_steps += 1
        self.skipped_in_a_row += 1

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.fit_loop._should_accumulate():
            return
        if self._empty is not None:
            self.empty_batches += int(trainer.strategy.reduce(self._empty, reduce_op="sum"))
            self._empty = None
        module.log("train/skipped_steps", float(self.skipped_steps))
        module.log("train/empty_batches", float(self.empty_batches))
        if self.skipped_in_a_row > self.max_skipped:
            raise ValueError(
                f"{self.skipped_in_a_row} steps in a row, up to step {trainer.global_step}, had a loss or gradient "
                "that is not finite: lower model.learning_rate, clip with trainer.gradient_clip_val, or train with "
                "trainer.precision 32-true"
            )


def _norm(gradients: list[Tensor]) -> Tensor:
    norm = nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # FSDP2 shards gradients, and so their norm
