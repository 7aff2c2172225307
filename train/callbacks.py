"""Lightning callbacks: what a training logs and prints, and skipped steps."""

import sys
import time
from datetime import timedelta
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from drafters.checks import check_at_least
from train.memory import peak_bytes, readable
from train.optimizer import is_accumulating, timer_of

PRINTED = {"val/acceptance_length": "acceptance length {:.3f}", "train/loss": "loss {:.3f}"}
PRINTED |= {"train/tokens_per_second": "{:,.0f} tokens a second"}  # metrics as they are printed


class ShortProgressBar(RichProgressBar):
    """Lightning's progress bar with names that fit into 80 columns, and without "/-2" for epochs without a limit."""

    def _get_train_description(self, current_epoch: int) -> str:
        return f"Epoch {current_epoch}"

    def get_metrics(self, *args: Any) -> dict[str, Any]:
        metrics = super().get_metrics(*args).items()
        return {name.rpartition("/")[2].removesuffix("_length"): value for name, value in metrics if name != "v_num"}


def is_logged_step(trainer: L.Trainer, step: int) -> bool:
    """Whether metrics are logged at a step."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by Lightning's logger connector
    return every > 0 and step % every == 0


class Speed(L.Callback):
    """Logs ``train/tokens_per_second`` over all processes, ``train/utilisation``, ``train/learning_rate`` and
    ``train/gradient_norm`` before clipping, and prints how far the training is and how long the remaining steps take.

    Only tokens that the base reads are counted, not the padding. Utilisation is the share of time spent inside of
    steps; the rest is waiting for data and writing checkpoints. Validation is left out. Each value covers the steps
    since the one before; with CUDA, the device is synchronized before a value is logged.
    """

    def __init__(self) -> None:
        self.line_time, self.step_seconds = time.monotonic(), 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.logged_step, self.num_logged = trainer.global_step, 0
        self._reset()

    def _reset(self) -> None:
        self.num_tokens, self.seconds_inside, self.seconds_outside = torch.zeros(()), 0.0, 0.0
        self.step_end: float | None = None  # None if something else than waiting happened since the last step

    def on_train_batch_start(self, *_: Any) -> None:
        self.step_start = time.perf_counter()
        if self.step_end is not None:
            self.seconds_outside += self.step_start - self.step_end

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if is_logged_step(trainer, trainer.global_step + 1):
            pl_module.log("train/learning_rate", optimizer.param_groups[0]["lr"])
            if gradients := gradients_of(optimizer):  # DeepSpeed gives no access to them
                pl_module.log("train/gradient_norm", total_norm(gradients))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, _: Any, batch: Any, *__: Any
    ) -> None:
        self.num_tokens = batch["lengths"].sum() + self.num_tokens.to(pl_module.device)  # without waiting for it
        num_steps = trainer.global_step - self.logged_step
        is_due = num_steps > 0 and is_logged_step(trainer, trainer.global_step)
        if is_due and pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        self.step_end = time.perf_counter()
        self.seconds_inside += self.step_end - self.step_start
        if is_due:
            seconds = self.seconds_inside + self.seconds_outside
            pl_module.log("train/tokens_per_second", self.num_tokens / seconds, sync_dist=True, reduce_fx="sum")
            pl_module.log("train/utilisation", self.seconds_inside / seconds, sync_dist=True)
            self.logged_step, self.num_logged = trainer.global_step, self.num_logged + 1
            self.step_seconds = seconds / num_steps
            if self.num_logged == 2 and trainer.is_global_zero:  # the first steps are slower
                of_what = "tensors on the GPU" if pl_module.device.type == "cuda" else "the process"
                so_far = f"{readable(peak_bytes(pl_module.device))} of {of_what}, with loading and validation"
                print(
                    f"{self.step_seconds:.3g} s a step{self.time_left(trainer)}; peak memory so far {so_far}",
                    flush=True,
                )
            self._reset()
            self.step_end = time.perf_counter()
        self.say(trainer)

    def time_left(self, trainer: L.Trainer) -> str:
        """Say how long the remaining steps take; nothing if their number or their time is not known."""
        num_left = trainer.estimated_stepping_batches - trainer.global_step
        if timer := timer_of(trainer):
            num_left = min(num_left, max(0, round((timer.time_remaining() or 0) / (self.step_seconds or 1))))
        if not self.step_seconds or num_left == float("inf"):
            return ""
        left = timedelta(seconds=round(self.step_seconds * num_left))
        return f": {num_left:,} more take about {left}, validation left out"

    def say(self, trainer: L.Trainer, is_due: bool = False, validated: int = 0) -> None:
        """Print how far the training is, or a validation without one, after so many batches, if a line is due.

        One is due each minute where there is no progress bar to see.
        """
        has_bar = sys.stdout.isatty() and trainer.progress_bar_callback
        if not is_due and (has_bar or time.monotonic() - self.line_time < 60):
            return
        self.line_time, metrics = time.monotonic(), trainer.callback_metrics  # which all processes may have to add up
        if trainer.is_global_zero and trainer.state.fn != TrainerFn.FITTING:
            print(f"validation: {validated} of {sum(trainer.num_val_batches)} batches", flush=True)
        elif trainer.is_global_zero:
            parts = [text.format(float(metrics[name])) for name, text in PRINTED.items() if name in metrics]
            print(", ".join([f"step {trainer.global_step:,}", *parts]) + self.time_left(trainer), flush=True)

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.say(trainer, validated=args[3] + 1)  # the number of the batch

    def on_validation_start(self, *_: Any) -> None:
        self.step_end = None

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self.say(trainer, is_due=True)
        self.step_end = time.perf_counter()


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """The gradients of all parameters that have one."""
    return [weight.grad for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]


def total_norm(gradients: list[Tensor]) -> Tensor:
    """Return the norm of all gradients together, also of gradients that FSDP2 shards."""
    norm = nn.utils.get_total_norm(gradients)
    # The norm of sharded gradients is a DTensor, whose full value is the same on all processes.
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


class SkipNonFiniteSteps(L.Callback):
    """Skips optimizer steps whose loss or gradient is not finite, and counts them.

    A skipped step leaves the weights and the optimizer as they were. It counts as a step, and the learning rate
    schedule advances. The gradients are checked after the processes have averaged them, so all processes skip the
    same steps. Under DeepSpeed, which gives no access to the gradients, nothing is skipped.

    Args:
        max_skipped: Number of consecutive steps that may be skipped; one more ends the run.
    """

    def __init__(self, max_skipped: int = 20) -> None:
        check_at_least(0, max_skipped=max_skipped)
        self.max_skipped = max_skipped
        self.skipped_steps = self.skipped_in_a_row = 0

    def state_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("skipped_steps", "skipped_in_a_row")}

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        value = loss.detach()
        # NaN if the loss is not finite: then all gradients become NaN, and after averaging those of all processes.
        one = 1 + (value - value)
        loss.register_hook(lambda gradient: gradient * one)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if torch.isfinite(total_norm(gradients_of(optimizer))):
            self.skipped_in_a_row = 0
            return
        optimizer.zero_grad(set_to_none=True)  # without gradients, the step changes neither weights nor its own state
        self.skipped_steps += 1
        self.skipped_in_a_row += 1

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if is_accumulating(trainer):
            return
        pl_module.log("train/skipped_steps", float(self.skipped_steps))
        if self.skipped_in_a_row > self.max_skipped:
            raise ValueError(
                f"{self.skipped_in_a_row} steps in a row, up to step {trainer.global_step}, had a loss or gradient "
                "that is not finite: train anew with a lower model.learning_rate, or go on with "
                "trainer.gradient_clip_val or trainer.precision 32-true"
            )
