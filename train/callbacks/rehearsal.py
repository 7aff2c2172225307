"""A training step on tensors without data, which shows how much memory a real one takes."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from drafters.losses.chunks import first_chunk_only
from drafters.nn.anchor_attention import without_masks
from drafters.protocol import BaseWeights, LearnedDrafter, TrainingBatch
from train.strategies import without_sharding

PRODUCTS = torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default


class BatchSize(NamedTuple):
    """Sizes of a training batch.

    Args:
        num_rows: B, conversations.
        num_positions: S, tokens of each of them.
    """

    num_rows: int
    num_positions: int


class StepBytes(NamedTuple):
    """Memory that the phases of a training step take besides weights, AdamW states, and the batch.

    Args:
        forward: Bytes at the worst moment of the drafter's forward pass and loss.
        backward: Bytes at the worst moment of the backward pass, without the gradients that it leaves.
    """

    forward: int
    backward: int


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations return while it is entered, and of none that existed before.

    What an operation allocates inside itself is not seen, except for the float32 sums of matrix products in half
    precision on a CPU without instructions for it.

    Args:
        existing: Tensors that exist already; results that share their memory do not count.
        sums_in_float32: Whether matrix products of bfloat16 and float16 hold their sums in float32 besides the result.

    Attributes:
        now: Bytes of the tensors that are alive.
        peak: Largest value of ``now`` since the last `restart`.
    """

    def __init__(self, *existing: Tensor, sums_in_float32: bool = False) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sums_in_float32 = sums_in_float32
        self._storages = {tensor.untyped_storage()._cdata for tensor in existing}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._count, result)
        if self._sums_in_float32 and function in PRODUCTS and result.element_size() == 2:
            self.peak = max(self.peak, self.now + 4 * result.numel())
        return result

    def restart(self) -> int:
        """Return the peak so far, and begin a new one."""
        peak, self.peak = self.peak, self.now
        return peak

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages.add(storage._cdata)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, address: int, num_bytes: int) -> None:
        self._storages.discard(address)
        self.now -= num_bytes


def sums_in_float32() -> bool:
    """Whether this CPU has no bfloat16 instructions, so that products of bfloat16 are summed in a float32 buffer."""
    return not torch.cpu._is_avx512_bf16_supported()


class _Step(nn.Module):
    def __init__(self, drafter: LearnedDrafter, autocast: torch.autocast) -> None:
        super().__init__()
        self.drafter, self.autocast = drafter, autocast

    def forward(self, batch: TrainingBatch, base_weights: BaseWeights, live: LiveBytes) -> int:
        """Run the loss and its backward pass, and return the peak of the loss."""
        with self.autocast:
            loss, _ = self.drafter.loss(batch, base_weights)
        forward = live.restart()
        loss.backward()
        return forward


def rehearse(
    drafter: LearnedDrafter,
    base_weights: BaseWeights,
    size: BatchSize,
    autocast_dtype: torch.dtype | None = None,
    is_gpu: bool = False,
    is_accumulating: bool = False,
    with_all_chunks: bool = False,
) -> StepBytes:
    """Train a drafter for a step on a batch of texts in which every token counts, without computing anything.

    Weights, hidden states and whatever is made of them have a shape and no data. Token ids, masks and anchors are real,
    because the sizes of other tensors depend on them.

    Args:
        drafter: The drafter; it is not changed, and its weights need no data.
        base_weights: The base's embedding and LM head, likewise.
        size: Size of the batch.
        autocast_dtype: Dtype that the trainer's autocast computes in, if it has one.
        is_gpu: Whether the training is on a GPU. FlexAttention, which cannot run without data, is then replaced by
            attention without a mask, which stores the same.
        is_accumulating: Whether the gradients of an earlier batch are there already.
        with_all_chunks: Run all chunks of the loss instead of one; for counting operations.
    """
    dtype = base_weights.head.dtype
    with FakeTensorMode(allow_non_fake_inputs=True):
        weights = {
            f"drafter.{name}": torch.empty(weight.shape, dtype=weight.dtype, requires_grad=weight.requires_grad)
            for name, weight in drafter.named_parameters()
        }
        embedding, head = (torch.empty(w.shape, dtype=w.dtype) for w in (base_weights.embedding, base_weights.head))
        last_hidden = torch.empty(*size, head.shape[1], dtype=dtype)
        hidden = torch.empty(*size, head.shape[1] * len(drafter.required_outputs.hidden_layers), dtype=dtype)
    # Buffers, such as a draft vocabulary, have data, and may lie on a GPU.
    buffers = {f"drafter.{name}": buffer.cpu() for name, buffer in drafter.named_buffers()}
    draftable = buffers.get("drafter.draft_tokens", torch.zeros(1, dtype=torch.long))[0]  # so that every label counts
    ids, mask = draftable.repeat(size), torch.ones(size, dtype=torch.bool)
    batch = TrainingBatch(hidden, last_hidden, ids, ids, mask)
    existing = *weights.values(), *buffers.values(), embedding, head, last_hidden, hidden, ids, mask
    live = LiveBytes(*existing, sums_in_float32=not is_gpu and sums_in_float32())
    step = _Step(without_sharding(drafter), torch.autocast("cpu", autocast_dtype, enabled=autocast_dtype is not None))
    masks = without_masks() if is_gpu else nullcontext()
    chunks = nullcontext() if with_all_chunks else first_chunk_only()
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), masks, chunks, live:
        for _ in range(1 + is_accumulating):
            forward = functional_call(step, weights | buffers, (batch, BaseWeights(embedding, head), live))
            backward = live.restart()
    gradients = sum(w.grad.nbytes for w in weights.values() if w.grad is not None)
    return StepBytes(forward, backward - gradients)
