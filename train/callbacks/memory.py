"""The memory that one device needs for a training, computed before its first step."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from drafters.learned.losses.chunks import MAX_BYTES
from drafters.protocol import BaseShape, BaseWeights, LearnedDrafter, TrainingBatch
from inference.engine.base import Base
from train.modules.drafter_training import DrafterTraining
from train.modules.strategies import FSDP2, is_deepspeed

FORWARD, ACTIVATIONS = "the base's forward", "the drafter's activations"


class BatchSize(NamedTuple):
    """Sizes of a training batch.

    Args:
        num_rows: B, conversations.
        num_positions: S, tokens of each of them.
        num_anchors: A, anchors of each of them.
    """

    num_rows: int
    num_positions: int
    num_anchors: int


def largest_batch(row_lengths: Iterable[int], settings: Any) -> tuple[int, int]:
    """Return B and S of the batch that needs the most memory: as many of the longest row as fit into one batch.

    Args:
        row_lengths: Number of tokens of each conversation.
        settings: Hyper-parameters of the data module.
    """
    longest, max_tokens = max(row_lengths), getattr(settings, "max_tokens", None)
    fitting = max(1, max_tokens // longest) if max_tokens else settings.batch_size
    return min(settings.batch_size, fitting), longest


def estimate_memory(module: DrafterTraining, trainer: L.Trainer, num_rows: int, num_positions: int) -> dict[str, float]:
    """Return the bytes needed on one device, by purpose.

    The base's forward and the drafter's activations are never in memory at the same time, see `peak_memory`.

    Args:
        module: The training module, on its device.
        trainer: Its trainer.
        num_rows: B.
        num_positions: S.
    """
    base, drafter = module.base, module.drafter
    parts = {"weights of the base": float(num_bytes(base.model))}
    parts |= _optimized_bytes(drafter, trainer)
    parts |= _base_output_bytes(base, len(drafter.required_outputs.hidden_layers) + 1, num_rows, num_positions)
    if not is_deepspeed(trainer):  # DeepSpeed has taken the drafter's weights away
        num_anchors = min(getattr(drafter, "num_anchors", 0) or num_positions, num_positions)
        size = BatchSize(num_rows, num_positions, num_anchors)
        activations = drafter_activations(drafter, base.shape, base.base_weights, size)
        parts[ACTIVATIONS] = activations + loss_bytes(drafter, base.shape, num_rows * num_anchors)
        if isinstance(drafter, FSDPModule):
            drafter.reshard()  # the losses above have gathered the weights
    return parts


def peak_memory(parts: dict[str, float]) -> float:
    """Return the bytes needed at the worst moment: the base's forward is over before the drafter's begins."""
    phases = FORWARD, ACTIVATIONS
    always = sum(part for name, part in parts.items() if name not in phases)
    return always + max(parts.get(name, 0) for name in phases)


def num_bytes(module: nn.Module) -> int:
    """Return the size of a module's weights."""
    return sum(weight.numel() * weight.element_size() for weight in module.parameters())


def _optimized_bytes(drafter: LearnedDrafter, trainer: L.Trainer) -> dict[str, float]:
    """Weights, gradients and optimizer states of the drafter, which strategies shard over the devices."""
    strategy, weights = trainer.strategy, num_bytes(drafter)
    is_fsdp = isinstance(strategy, FSDP2)
    share = 1 / trainer.world_size if is_fsdp or is_deepspeed(trainer) else 1
    has_buckets = isinstance(strategy, DDPStrategy) and trainer.world_size > 1  # DDP keeps a copy of all gradients
    return {
        "weights of the drafter": weights * (1 + share if is_fsdp else 1),
        "their gradients": weights * (share + has_buckets),
        "their AdamW states": 2 * weights * share,
    }


def _base_output_bytes(base: Base, num_states: int, num_rows: int, num_positions: int) -> dict[str, float]:
    """Hidden states that the base returns, and an estimate of what its forward pass needs on the way."""
    shape, num_tokens = base.shape, num_rows * num_positions
    element = next(weight.element_size() for weight in base.model.parameters() if weight.is_floating_point())
    layer = num_tokens * (3 * shape.intermediate_size + 4 * shape.hidden_size)
    return {
        "hidden states of the base": num_tokens * num_states * shape.hidden_size * element,
        FORWARD: element * (layer + num_positions * shape.vocab_size),
    }


def drafter_activations(drafter: LearnedDrafter, shape: BaseShape, base_weights: BaseWeights, size: BatchSize) -> float:
    """Return the bytes that a drafter's loss keeps for its backward pass.

    They are a polynomial of degree 2 in S and A, times B, plus one in S for masks that all rows share. The
    coefficients are fitted to what the loss keeps of short texts.

    Args:
        drafter: The drafter, on its device.
        shape: Shape of the base.
        base_weights: The base's embedding and LM head.
        size: Size of the batch.
    """

    def terms(b: int, s: int, a: int) -> list[float]:
        return [1.0, s, s * s, b, b * s, b * a, b * s * s, b * s * a, b * a * a]

    # `AnchorMask` works on blocks of positions: these sizes are whole numbers of blocks.
    sizes = [BatchSize(*each) for each in product((1, 2), (64, 96, 128), (16, 32, 48))]
    kept = [float(kept_bytes(drafter, shape, base_weights, each)) for each in sizes]
    coefficients, *_ = np.linalg.lstsq(np.array([terms(*each) for each in sizes], dtype=float), np.array(kept))
    return max(0.0, float(coefficients @ terms(*size)))


def kept_bytes(drafter: LearnedDrafter, shape: BaseShape, base_weights: BaseWeights, size: BatchSize) -> int:
    """Return the bytes that the loss on a batch keeps for its backward pass, without the weights and the batch.

    Args:
        drafter: The drafter, on its device.
        shape: Shape of the base.
        base_weights: The base's embedding and LM head.
        size: Size of the batch.
    """
    device = base_weights.head.device
    num_rows, num_positions, num_anchors = size
    states = torch.zeros(num_rows, num_positions, shape.hidden_size, dtype=base_weights.head.dtype, device=device)
    hidden = states.repeat(1, 1, len(drafter.required_outputs.hidden_layers))
    ids = torch.zeros(num_rows, num_positions, dtype=torch.long, device=device)
    mask = torch.arange(num_positions, device=device).expand(num_rows, -1) >= num_positions - num_anchors
    batch = TrainingBatch(hidden, states, ids, ids, mask)
    kept: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # a result that is held by its own graph would never be freed

    with torch.random.fork_rng(), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        loss, _ = drafter.loss(batch, base_weights)
    inputs = [*drafter.parameters(), base_weights.embedding, base_weights.head, hidden, states, ids, mask]
    for tensor in inputs:
        kept.pop(getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr(), None)
    del loss
    return sum(kept.values())


def loss_bytes(drafter: LearnedDrafter, shape: BaseShape, num_anchors: int) -> int:
    """Return the bytes of the logits that a loss holds at a time: those of one chunk, or all if there are few.

    Args:
        drafter: The drafter.
        shape: Shape of the base.
        num_anchors: Number of anchors of the whole batch.
    """
    if num_frames := getattr(drafter, "num_frames", None):
        return min(MAX_BYTES, 2 * 4 * num_anchors * num_frames * shape.vocab_size)
    chunk_size: Any = getattr(drafter, "chunk_positions", None) or getattr(drafter, "chunk_anchors", num_anchors)
    return 3 * 4 * min(chunk_size, num_anchors) * shape.vocab_size
