"""What a training logs besides its losses: speed, utilisation, learning rate and gradient norm."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
from torch import Tensor

from drafters.losses import anchors
from inference.timing import gpu_use
from train.callbacks.skip_non_finite_steps import total_norm


def count_anchors(loss_mask: Tensor, max_anchors: int) -> Tensor:
    """Return how many anchors a batch has.

    Args:
        loss_mask: (B, S) bool.
        max_anchors: Maximum number of anchors in a sequence; 0 means that every possible position is one.
    """
    counts = anchors.valid_positions(loss_mask).sum(1)
    return (counts.clamp(max=max_anchors) if max_anchors else counts).sum()


class Speed(L.Callback):
    """Logs ``train/tokens_per_second`` and ``train/anchors_per_second`` summed over all processes,
    ``train/utilisation`` and, if CUDA reports it, ``train/gpu_utilisation``.

    Only tokens that the base reads are counted, not the padding. Utilisation is the share of time spent inside of
    steps; the rest is waiting for data and writing checkpoints. Validation is left out. Each value covers the steps
    since the one before; with CUDA, the device is synchronized before a value is logged.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        # These move to the module's device later, where they can be added up without waiting for it.
        self.num_tokens = self.num_anchors = torch.zeros(())
        self.seconds_inside = self.seconds_outside = 0.0
        self.step_end: float | None = None  # None if something else than waiting happened since the last step

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._reset()
        self.logged_step = trainer.global_step

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.step_start = time.perf_counter()
        if self.step_end is not None:
            self.seconds_outside += self.step_start - self.step_end

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.num_tokens = batch["lengths"].sum() + self.num_tokens.to(pl_module.device)
        max_anchors = getattr(getattr(pl_module, "drafter", None), "num_anchors", None)
        if max_anchors is not None:
            self.num_anchors = count_anchors(batch["loss_mask"], max_anchors) + self.num_anchors.to(pl_module.device)
        is_due = is_logged_step(trainer, trainer.global_step) and trainer.global_step != self.logged_step
        if is_due and pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        self.step_end = time.perf_counter()
        self.seconds_inside += self.step_end - self.step_start
        if is_due:
            self._log(pl_module)
            self._reset()
            self.logged_step = trainer.global_step
            self.step_end = time.perf_counter()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.step_end = None

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.step_end = time.perf_counter()

    def _log(self, module: L.LightningModule) -> None:
        seconds = self.seconds_inside + self.seconds_outside
        rates = {"train/tokens_per_second": self.num_tokens / seconds}
        if hasattr(module, "drafter"):
            rates["train/anchors_per_second"] = self.num_anchors / seconds
        shares = {"train/utilisation": self.seconds_inside / seconds}
        if (percent := gpu_use(module.device)) is not None:
            shares["train/gpu_utilisation"] = percent / 100
        module.log_dict(rates, sync_dist=True, reduce_fx="sum")
        module.log_dict(shares, sync_dist=True)


class Optimisation(L.Callback):
    """Logs ``train/gradient_norm``, which is the norm before clipping, and ``train/learning_rate``."""

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if not is_logged_step(trainer, trainer.global_step + 1):
            return
        groups = optimizer.param_groups
        gradients = [weight.grad for group in groups for weight in group["params"] if weight.grad is not None]
        if gradients:  # DeepSpeed gives no access to them
            pl_module.log("train/gradient_norm", total_norm(gradients))
        pl_module.log("train/learning_rate", groups[0]["lr"])


def is_logged_step(trainer: L.Trainer, step: int) -> bool:
    """Whether metrics are logged at a step."""
    return step % trainer.log_every_n_steps == 0  # type: ignore[attr-defined]  # set by Lightning's logger connector
