"""What a training will need: memory before its first step, and time after some steps."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from itertools import product
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console
from rich.table import Table
from torch import Tensor

from data.sharegpt import lengths
from drafters.learned.losses.chunks import MAX_BYTES
from drafters.protocol import BaseShape, BaseWeights, LearnedDrafter, TrainingBatch
from train.modules.strategies import FSDP2, is_deepspeed

NUM_STEPS = 20  # that are timed, after the first two


class Estimate(L.Callback):
    """Prints the memory a device will need before the first step, and the time of all steps after 22 of them.

    Weights, gradients and optimizer states are counted, the base's activations go by a formula, the drafter's are
    extrapolated from texts of a few tokens. What an allocator adds is not known.
    """

    def __init__(self) -> None:
        self._num_batches, self._started = 0, 0.0

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        rows = getattr(trainer.datamodule, "train_set", None)
        if rows is None or not hasattr(module, "drafter"):
            return
        size = largest_batch(lengths(rows), trainer.datamodule.hparams)
        with trainer.precision_plugin.train_step_context():
            parts = memory(module, trainer, *size)
        show(parts, *size, device_bytes(module.device))

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self._num_batches += 1
        if self._num_batches == 2:
            self._started = now(module.device)
        elif self._num_batches == 2 + NUM_STEPS:
            seconds = (now(module.device) - self._started) / NUM_STEPS
            left = trainer.estimated_stepping_batches - trainer.global_step
            say_time(seconds, left * trainer.accumulate_grad_batches, peak_bytes(module.device))

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.sanity_checking and self._num_batches < 2 + NUM_STEPS:
            self._num_batches = 0  # the clock would run on: start again after it


def largest_batch(row_lengths: Iterable[int], settings: Any) -> tuple[int, int]:
    """B and S of the batch that needs most: the longest row, and as many of it as go into one."""
    longest, most = max(row_lengths), getattr(settings, "max_tokens", None)
    return min(settings.batch_size, max(1, most // longest) if most else settings.batch_size), longest


def memory(module: L.LightningModule, trainer: L.Trainer, num_rows: int, num_positions: int) -> dict[str, float]:
    """Bytes on one device, by what they are for; the activations of drafter and base are not there at once.

    Args:
        module: A `train.modules.drafter_training.DrafterTraining` on its device.
        trainer: Its trainer.
        num_rows: B.
        num_positions: S.
    """
    base, drafter, strategy = module.base, module.drafter, trainer.strategy
    weights = sum(weight.numel() * weight.element_size() for weight in drafter.parameters())
    is_sharded = isinstance(strategy, FSDP2) or is_deepspeed(trainer)
    share = 1 / trainer.world_size if is_sharded else 1
    has_buckets = isinstance(strategy, DDPStrategy) and trainer.world_size > 1  # DDP keeps a copy of all gradients
    element = next(weight.element_size() for weight in base.model.parameters() if weight.is_floating_point())
    shape, num_tokens = base.shape, num_rows * num_positions
    num_states = len(drafter.required_outputs.hidden_layers) + 1
    parts = {
        "weights of the base": sum(weight.numel() * weight.element_size() for weight in base.model.parameters()),
        "weights of the drafter": weights * (1 + share if isinstance(strategy, FSDP2) else 1),
        "their gradients": weights * (share + has_buckets),
        "their AdamW states": 2 * weights * share,
        "hidden states of the base": num_tokens * num_states * shape.hidden_size * element,
        "the base's forward": element
        * (num_tokens * (3 * shape.intermediate_size + 4 * shape.hidden_size) + num_positions * shape.vocab_size),
    }
    if not is_deepspeed(trainer):  # it has taken the weights away
        num_anchors = min(getattr(drafter, "num_anchors", 0) or num_positions, num_positions)
        kept = drafter_activations(drafter, shape, base.base_weights, num_positions, num_anchors, num_rows)
        parts["the drafter's activations"] = kept + loss_bytes(drafter, shape, num_rows * num_anchors)
        if isinstance(strategy, FSDP2):
            drafter.reshard()
    return parts


def drafter_activations(
    drafter: LearnedDrafter,
    shape: BaseShape,
    base_weights: BaseWeights,
    num_positions: int,
    num_anchors: int,
    num_rows: int,
) -> float:
    """Bytes that a drafter's loss keeps for its backward pass, from what it keeps of short texts.

    They are a polynomial of degree 2 in S and A times B, and one in S for masks that all texts share; so texts of a few
    tokens tell them.

    Args:
        drafter: On its device. shape: The base's. borrowed: The base's embedding and head.
        num_positions: S. num_anchors: A, anchors or positions of assistant tokens in a sequence. num_rows: B.
    """

    def terms(b: int, s: int, a: int) -> list[float]:
        return [1.0, s, s * s, b, b * s, b * a, b * s * s, b * s * a, b * a * a]

    sizes = list(product((1, 2), (64, 96, 128), (16, 32, 48)))  # whole pieces of an `AnchorMask`
    kept = [float(kept_bytes(drafter, shape, base_weights, *size)) for size in sizes]
    coefficients, *_ = np.linalg.lstsq(np.array([terms(*size) for size in sizes], dtype=float), np.array(kept))
    return max(0.0, float(coefficients @ terms(num_rows, num_positions, num_anchors)))


def kept_bytes(
    drafter: LearnedDrafter,
    shape: BaseShape,
    base_weights: BaseWeights,
    num_rows: int,
    num_positions: int,
    num_anchors: int,
) -> int:
    """Bytes that the loss of random texts keeps for its backward pass, beside weights and the texts themselves."""
    device = base_weights.head.device
    states = torch.zeros(num_rows, num_positions, shape.hidden_size, dtype=base_weights.head.dtype, device=device)
    hidden = states.repeat(1, 1, len(drafter.required_outputs.hidden_layers))
    ids = torch.zeros(num_rows, num_positions, dtype=torch.long, device=device)
    mask = torch.arange(num_positions, device=device).expand(num_rows, -1) >= num_positions - num_anchors
    batch = TrainingBatch(hidden, states, ids, ids, mask)
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # a result that its own graph held would never be freed

    with torch.random.fork_rng(), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        loss, _ = drafter.loss(batch, base_weights)
    given = [*drafter.parameters(), base_weights.embedding, base_weights.head, hidden, states, ids, mask]
    for tensor in given:
        kept.pop(getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr(), None)
    del loss
    return sum(kept.values())


def loss_bytes(drafter: LearnedDrafter, shape: BaseShape, num_anchors: int) -> int:
    """What a loss holds of the logits over the vocabulary at once: a chunk, or all where they are few."""
    if frames := getattr(drafter, "num_frames", None):
        return min(MAX_BYTES, 2 * 4 * num_anchors * frames * shape.vocab_size)
    rows = getattr(drafter, "chunk_positions", None) or getattr(drafter, "chunk_anchors", num_anchors)
    return 3 * 4 * min(rows, num_anchors) * shape.vocab_size


def total(parts: dict[str, float]) -> float:
    """Bytes at the worst moment: the base's forward is over when the drafter's begins."""
    phases = "the base's forward", "the drafter's activations"
    return sum(part for name, part in parts.items() if name not in phases) + max(parts.get(name, 0) for name in phases)


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


@rank_zero_only
def show(parts: dict[str, float], num_rows: int, num_positions: int, available: int | None) -> None:
    """Print the parts and their sum."""
    table = Table("", "", show_header=False)
    table.columns[1].justify = "right"
    for name, part in parts.items():
        table.add_row(name, gigabytes(part))
    table.add_section()
    room = f" of {gigabytes(available)}" if available else ""
    table.add_row("at the worst moment", gigabytes(total(parts)) + room)
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(f"memory of a device, for a batch of {num_rows} texts of {num_positions} tokens (estimated)")
    console.print(table)
    if available and total(parts) > 0.95 * available:
        console.print(
            "That is more than there is: lower data.batch_size (and raise trainer.accumulate_grad_batches), "
            "data.max_length or the drafter's num_anchors, or pass --model.activation_checkpointing true or "
            "--model.base_dtype nf4"
        )


@rank_zero_only
def say_time(seconds: float, num_batches: int, peak: int) -> None:
    """Print how long the batches that are left will take."""
    left = timedelta(seconds=round(seconds * num_batches))
    print(
        f"{seconds:.3g} s a batch: {num_batches:,} more take about {left}, validation left out; "
        f"peak memory so far {gigabytes(peak)}",
        flush=True,
    )


def now(device: torch.device) -> float:
    """Seconds, when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def device_bytes(device: torch.device) -> int | None:
    """Memory of a GPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def peak_bytes(device: torch.device) -> int:
    """Most memory so far: of torch's allocator on a GPU, of the whole process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
