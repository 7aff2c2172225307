"""Estimates of a training's memory, printed before the first step, and of its time, printed after some steps."""

from __future__ import annotations

import math
import resource
import sys
import time
from datetime import timedelta
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.filesize import decimal
from rich.table import Table

from data.files import SafeConsole, cause_of
from data.rows import lengths
from train.callbacks.memory import estimate_memory, largest_batch, peak_memory
from train.module import DrafterTraining

NUM_WARM_UP_STEPS = 2
NUM_STEPS = 20  # that are timed after the warm-up


class Estimate(L.Callback):
    """Prints the memory that a device will need, and after 22 steps the time of the remaining ones.

    The base's activations follow a formula. All that the drafter needs is taken from a rehearsal with tensors without
    data. On a CPU the memory is that of the process. What the allocator keeps of freed memory is not included.
    """

    def __init__(self) -> None:
        self._num_batches, self._start_time = 0, 0.0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data: Any = getattr(trainer, "datamodule", None)
        rows = getattr(data, "train_set", None)
        if rows is None or not isinstance(pl_module, DrafterTraining):
            return
        num_rows, num_positions = largest_batch(lengths(rows), data.hparams)
        try:
            with trainer.precision_plugin.train_step_context():
                parts = estimate_memory(pl_module, trainer, num_rows, num_positions)
        except Exception as error:  # the drafter of another package may read numbers, which a rehearsal has not
            print(f"the memory of {type(pl_module.drafter).__name__} cannot be estimated: {cause_of(error)}")
            return
        show_memory(parts, num_rows, num_positions, device_bytes(pl_module.device))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._num_batches += 1
        if self._num_batches == NUM_WARM_UP_STEPS:
            self._start_time = synchronized_time(pl_module.device)
        elif self._num_batches == NUM_WARM_UP_STEPS + NUM_STEPS:
            seconds = (synchronized_time(pl_module.device) - self._start_time) / NUM_STEPS
            num_steps = trainer.estimated_stepping_batches - trainer.global_step
            show_time(seconds, num_steps * trainer.accumulate_grad_batches, peak_bytes(pl_module.device))

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking and self._num_batches < NUM_WARM_UP_STEPS + NUM_STEPS:
            self._num_batches = 0  # validation would be timed too: start again after it


@rank_zero_only
def show_memory(parts: dict[str, float], num_rows: int, num_positions: int, available: int | None) -> None:
    """Print the estimated memory by purpose and in total.

    Args:
        parts: Bytes by purpose.
        num_rows: B.
        num_positions: S.
        available: Memory of the device, or None if it is not a GPU.
    """
    table = Table("", "", show_header=False)
    table.columns[1].justify = "right"
    for name, part in parts.items():
        table.add_row(name, readable(part))
    table.add_section()
    of_available = f" of {readable(available)}" if available else ""
    table.add_row("at the worst moment", readable(peak_memory(parts)) + of_available)
    console = SafeConsole(width=None if sys.stdout.isatty() else 100)
    console.print(f"memory of a device, for a batch of {num_rows} texts of {num_positions} tokens (estimated)")
    console.print(table)
    if available and peak_memory(parts) > 0.95 * available:
        console.print(
            "That is more than there is: lower data.batch_size (and raise trainer.accumulate_grad_batches), "
            "data.max_length or the drafter's num_anchors, or pass --model.activation_checkpointing true or "
            "--model.base_dtype nf4"
        )


@rank_zero_only
def show_time(seconds: float, num_batches: float, peak_so_far: int) -> None:
    """Print the time of the remaining batches.

    Args:
        seconds: Time of one batch.
        num_batches: Number of remaining batches; infinity if only time limits the training.
        peak_so_far: Largest number of bytes allocated so far.
    """
    remaining = ""
    if not math.isinf(num_batches):
        time_left = timedelta(seconds=round(seconds * num_batches))
        remaining = f": {num_batches:,} more take about {time_left}, validation left out"
    print(f"{seconds:.3g} s a batch{remaining}; peak memory so far {readable(peak_so_far)}", flush=True)


def readable(num_bytes: float) -> str:
    """Return a size with its unit, like 1.50 GB."""
    return decimal(round(num_bytes), precision=2)


def synchronized_time(device: torch.device) -> float:
    """Return the time in seconds, after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def device_bytes(device: torch.device) -> int | None:
    """Return the memory of a GPU, or None for another device."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory so far: of torch's allocator on a GPU, of the whole process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
