"""The memory that one device needs for a training, computed before its first step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from drafters.protocol import LearnedDrafter
from inference.verifier.base import Base
from train.callbacks.averaged_weights import AveragedWeights
from train.callbacks.rehearsal import BatchSize, rehearse, sums_in_float32
from train.module import DrafterTraining
from train.strategies import FSDP2

HIDDEN = "hidden states of the base"
FORWARD, LOSS, BACKWARD = "the base's forward", "the drafter's activations", "its backward pass"
OPTIMIZER = "the optimizer step"
SMAPS = Path("/proc/self/smaps")


def largest_batch(row_lengths: Iterable[int], settings: Any) -> tuple[int, int]:
    """Return B and S of the batch that needs the most memory: as many of the longest row as fit into one batch.

    Args:
        row_lengths: Number of tokens of each conversation.
        settings: Hyper-parameters of the data module.
    """
    longest, max_tokens = max(row_lengths), getattr(settings, "max_tokens", None)
    fitting = max(1, max_tokens // longest) if max_tokens else settings.batch_size
    return min(settings.batch_size, fitting), longest


@dataclass(frozen=True)
class Setting:
    """What the memory of a training depends on besides the base, the drafter and the batch.

    Args:
        device: Type of the devices, such as cuda.
        num_devices: Number of processes, each with a device of its own.
        strategy: Strategy of the trainer.
        autocast_dtype: Dtype that autocast computes in, if it is on.
        is_accumulating: Whether a step has several batches.
        has_sharded_base: Whether the layers of the base are sharded over the devices.
        has_averages: Whether averages of the drafter's weights are kept beside them.
    """

    device: str
    num_devices: int
    strategy: Strategy
    autocast_dtype: torch.dtype | None = None
    is_accumulating: bool = False
    has_sharded_base: bool = False
    has_averages: bool = False

    @property
    def share(self) -> float:
        """The part of the drafter's optimizer states that one device holds."""
        return 1 / self.num_devices if isinstance(self.strategy, FSDP2 | DeepSpeedStrategy) else 1


def estimate_memory(module: DrafterTraining, trainer: L.Trainer, num_rows: int, num_positions: int) -> dict[str, float]:
    """Return the bytes needed on one device, by purpose, under the autocast that is active; see `memory_parts`.

    Args:
        module: The training module, on its device.
        trainer: Its trainer.
        num_rows: B.
        num_positions: S.
    """
    base, drafter = module.base, module.drafter
    device = base.base_weights.head.device.type
    setting = Setting(
        device,
        trainer.world_size,
        trainer.strategy,
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
        trainer.accumulate_grad_batches > 1,
        isinstance(base.model.base_model, FSDPModule),
        any(isinstance(callback, AveragedWeights) for callback in getattr(trainer, "callbacks", [])),
    )
    parts = memory_parts(base, drafter, BatchSize(num_rows, num_positions), setting)
    if device == "cpu":
        weights = [*base.model.parameters(), *drafter.parameters()]
        local = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
        parts["Python, libraries and texts"] = resident_bytes_besides(local)
    return parts


def memory_parts(base: Base, drafter: LearnedDrafter, size: BatchSize, setting: Setting) -> dict[str, float]:
    """Return the bytes of weights and tensors on one device, by purpose; neither base nor drafter needs data.

    The base's forward, the drafter's loss, its backward pass and the optimizer step follow each other, see
    `peak_memory`.
    """
    is_gpu = setting.device == "cuda"
    parts = _base_bytes(base, setting) | _optimized_bytes(drafter, setting)
    parts |= _base_output_bytes(base, drafter.required_outputs.hidden_layers, size, setting.device)
    if not isinstance(setting.strategy, DeepSpeedStrategy):  # DeepSpeed has taken the drafter's weights away
        dtype, is_accumulating = setting.autocast_dtype, setting.is_accumulating
        step = rehearse(drafter, base.base_weights, size, dtype, is_gpu, is_accumulating)
        parts |= {LOSS: step.forward, BACKWARD: step.backward}
        parts[OPTIMIZER] = adamw_temporaries(drafter.parameters(), is_gpu) * setting.share
    return parts


def peak_memory(parts: dict[str, float]) -> float:
    """Return the bytes needed at the worst moment.

    The gradients are there all the time, because they are kept until the next backward pass; the hidden states until
    the optimizer step.
    """
    phases = FORWARD, LOSS, BACKWARD
    always = sum(part for name, part in parts.items() if name not in (HIDDEN, OPTIMIZER, *phases))
    in_batch = parts.get(HIDDEN, 0) + max(parts.get(name, 0) for name in phases)
    return always + max(in_batch, parts.get(OPTIMIZER, 0))


def num_bytes(module: nn.Module) -> int:
    """Return the size of a module's weights."""
    return sum(weight.numel() * weight.element_size() for weight in module.parameters())


def resident_bytes_besides(weights: Collection[Tensor]) -> float:
    """Return the memory of this process without that of some weights, or 0 if the system does not tell (Linux does).

    Weights may lie in a mapped file, of which only what has been read is in memory.
    """
    if not SMAPS.exists():
        return 0
    addresses = sorted({weight.data_ptr() for weight in weights})
    resident, in_files = 0, set()
    ours: list[int] = []
    for line in SMAPS.read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            start, end = (int(address, 16) for address in words[0].split("-"))
            is_file = len(words) > 5 and words[5].startswith("/")
            ours = addresses[bisect_left(addresses, start) : bisect_left(addresses, end)] if is_file else []
            in_files.update(ours)
        elif words[0] == "Rss:" and not ours:
            resident += 1024 * int(words[1])
    return resident - sum(weight.nbytes for weight in weights if weight.data_ptr() not in in_files)


def adamw_temporaries(weights: Iterable[Tensor], is_gpu: bool) -> int:
    """Return the bytes that a step of AdamW needs for a while.

    On a GPU these are the roots of all second moments. On a CPU, where the weights follow each other, they are the root
    and the denominator of one weight, and the denominator of the one before.
    """
    sizes = [weight.nbytes for weight in weights]
    return sum(sizes) if is_gpu else max(before + 2 * size for before, size in pairwise([0, *sizes]))


def _base_bytes(base: Base, setting: Setting) -> dict[str, float]:
    """Weights of the base; of sharded layers the own part, and two whole ones: one runs while the next is gathered."""
    everything = num_bytes(base.model)
    if not setting.has_sharded_base:
        return {"weights of the base": everything}
    decoder: Any = base.model.base_model
    layers = [num_bytes(layer) for layer in decoder.layers]
    return {
        "weights of the base": everything - sum(layers) * (1 - 1 / setting.num_devices),
        "its gathered layers": 2 * max(layers),
    }


def _optimized_bytes(drafter: LearnedDrafter, setting: Setting) -> dict[str, float]:
    """Weights, gradients and optimizer states of the drafter, which strategies shard over the devices."""
    weights, share = num_bytes(drafter), setting.share
    has_buckets = isinstance(setting.strategy, DDPStrategy) and setting.num_devices > 1  # DDP copies all gradients
    copies = share if isinstance(setting.strategy, FSDP2) else setting.has_averages
    return {
        "weights of the drafter": weights * (1 + copies),
        "their gradients": weights * (share + has_buckets),
        "their AdamW states": 2 * weights * share,
    }


def _base_output_bytes(base: Base, layers: tuple[int, ...], size: BatchSize, device: str) -> dict[str, float]:
    """Hidden states that the base returns, and what its forward pass and the labels need besides them."""
    shape, num_tokens = base.shape, size.num_rows * size.num_positions
    element = next(weight.element_size() for weight in base.model.parameters() if weight.is_floating_point())
    sums = 4 if element == 2 and device == "cpu" and sums_in_float32() else 0  # bytes besides a product's result
    state, inner = num_tokens * shape.hidden_size, num_tokens * shape.intermediate_size
    layer = element * 4 * state + inner * max(3 * element, 2 * element + sums)  # gate, up projection, their product
    logits = (element + sums) * size.num_positions * shape.vocab_size  # of one text
    return {
        HIDDEN: element * state * (len(layers) + 1),
        FORWARD: max(layer, element * state * len(layers), logits),
    }
