"""What a training shows of itself besides its losses: speed, how busy it is, learning rate and gradient norm."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
from torch import Tensor

from drafters.learned.losses import anchors
from inference.runs.timing import gpu_use


def num_anchors(loss_mask: Tensor, most: int) -> Tensor:
    """Anchors that a batch gives: of each sequence at most ``most``, or all candidates where that is 0.

    Args:
        loss_mask: (B, S) bool.
    """
    counts = anchors.valid_positions(loss_mask).sum(1)
    return (counts.clamp(max=most) if most else counts).sum()


class Speed(L.Callback):
    """Logs ``train/tokens_per_second`` and ``train/anchors_per_second`` of all processes together,
    ``train/utilisation`` and, where CUDA's own count can be read, ``train/gpu_utilisation``.

    Tokens are those the base reads, padding left out. Utilisation is the share of time spent inside steps; the rest is
    waiting for data and writing checkpoints. Validation is left out of both. Each value is over the steps since the
    last one; under CUDA it is the device that is waited for at their end.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.tokens = self.anchors = torch.zeros(())  # on the module's device later: reading them would wait for it
        self.inside = self.outside = 0.0  # seconds
        self.left: float | None = None  # when the last step ended, where nothing but waiting has come since

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._reset()
        self.logged = trainer.global_step

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.entered = time.perf_counter()
        if self.left is not None:
            self.outside += self.entered - self.left

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.tokens = batch["lengths"].sum() + self.tokens.to(pl_module.device)
        most = getattr(getattr(pl_module, "drafter", None), "num_anchors", None)
        if most is not None:
            self.anchors = num_anchors(batch["loss_mask"], most) + self.anchors.to(pl_module.device)
        is_due = trainer.global_step % trainer.log_every_n_steps == 0 and trainer.global_step != self.logged
        if is_due and pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        self.left = time.perf_counter()
        self.inside += self.left - self.entered
        if is_due:
            self._log(pl_module)
            self._reset()
            self.logged = trainer.global_step
            self.left = time.perf_counter()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.left = None

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.left = time.perf_counter()

    def _log(self, module: L.LightningModule) -> None:
        seconds = self.inside + self.outside
        rates = {"train/tokens_per_second": self.tokens / seconds}
        if hasattr(module, "drafter"):
            rates["train/anchors_per_second"] = self.anchors / seconds
        shares = {"train/utilisation": self.inside / seconds}
        if (busy := gpu_use(module.device)) is not None:
            shares["train/gpu_utilisation"] = busy / 100
        module.log_dict(rates, sync_dist=True, reduce_fx="sum")
        module.log_dict(shares, sync_dist=True)


class Optimisation(L.Callback):
    """Logs ``train/gradient_norm``, that before clipping, and ``train/learning_rate``."""

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if (trainer.global_step + 1) % trainer.log_every_n_steps:
            return
        groups = optimizer.param_groups
        gradients = [weight.grad for group in groups for weight in group["params"] if weight.grad is not None]
        if gradients:  # DeepSpeed keeps its own
            norm = torch.nn.utils.get_total_norm(gradients)
            whole = getattr(norm, "full_tensor", None)  # of a sharded weight (FSDP2): the same on all processes
            pl_module.log("train/gradient_norm", whole() if whole else norm)
        pl_module.log("train/learning_rate", groups[0]["lr"])
