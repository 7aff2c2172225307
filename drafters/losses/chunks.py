"""A sum over anchors and its gradient, computed one chunk of anchors at a time."""

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drafters.dry_run import dry_run_device

MAX_BYTES = 2**26
"""Memory for the tensors of one chunk: 64 MiB."""
CUDA_BYTES_PER_CALL = 2**22
"""The same on a GPU, for each operator that a chunk calls: 4 MiB, on which it works as long as a slow host launches.

By estimate a chunk's products and sweeps take an H100 6 us for each MiB; hosts launch an operator in 8 to 26 us.
"""

PerAnchor = TypeVar("PerAnchor", bound=NamedTuple)


def anchors_per_chunk(num_vectors: int, vocab_size: int, device: torch.device, num_calls: int = 64) -> int:
    """The number of anchors, at least one, whose vectors over the vocabulary fit into the memory of a chunk.

    Each of an anchor's ``num_vectors`` is held in float32, with its gradient. On a GPU a chunk of more operators is
    larger, so that it computes for longer than the launches of its ``num_calls`` operators take.
    """
    max_bytes = num_calls * CUDA_BYTES_PER_CALL if "cuda" in (device.type, dry_run_device()) else MAX_BYTES
    return max(1, max_bytes // (8 * num_vectors * vocab_size))


def chunks(length: int, size: int) -> list[slice]:
    """The equal parts of at most ``size`` that a loss over ``length`` items is computed in, at least one.

    In a dry run it is only the first.

    >>> chunks(5, 4)
    [slice(0, 3, None), slice(3, 6, None)]
    """
    num_chunks = max(1, ceil(length / size))
    size = ceil(length / num_chunks)
    return [slice(n * size, (n + 1) * size) for n in range(1 if dry_run_device() else num_chunks)]


def chunked(
    sums: Callable[..., tuple[Tensor, Tensor]], per_anchor: PerAnchor, shared: Sequence[Tensor | None], size: int
) -> tuple[Tensor, Tensor]:
    """Sum a loss over anchors while holding the intermediate tensors of only one chunk.

    If a gradient is needed, it is computed chunk by chunk in the same pass as the loss; the backward pass only
    multiplies it by the upstream gradient. Nothing is computed twice, as checkpointing would. This is correct because
    the loss is a plain sum over chunks. Tensors that ``sums`` closes over get no gradient.

    Args:
        sums: Takes a chunk of ``per_anchor``, and each of ``shared``. Returns the chunk's loss, a scalar, and numbers
            without a gradient; both are summed over chunks. Runs with autocast disabled.
        per_anchor: Tensors (A, ...), split along the anchors, or None.
        shared: Tensors that every chunk uses completely, such as weights, or None.
        size: Anchors per chunk.
    """
    return _Chunked.apply(sums, type(per_anchor), size, torch.is_grad_enabled(), *per_anchor, *shared)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sums: Callable, kind: Any, size: int, needs_gradient: bool, *tensors: Tensor | None):
        num_split = len(kind._fields)
        gradients: dict[int, Tensor] = {}
        for place, tensor in enumerate(tensors):
            if needs_gradient and tensor is not None and tensor.requires_grad:
                is_split = place < num_split  # gradients of shared tensors add up: in float32 at least
                dtype = tensor.dtype if is_split else torch.promote_types(tensor.dtype, torch.float32)
                gradients[place] = torch.zeros_like(tensor, dtype=dtype)
        first: Any = tensors[0]
        loss: Any = 0.0
        numbers: Any = 0.0
        with torch.autocast(first.device.type, enabled=False), torch.set_grad_enabled(bool(gradients)):
            for here in chunks(len(first), size):
                part = [x if x is None or place >= num_split else x[here] for place, x in enumerate(tensors)]
                into = {place: x[here] if place < num_split else x for place, x in gradients.items()}
                part_loss, part_numbers = _one_chunk(sums, kind, part, into)
                loss, numbers = loss + part_loss, numbers + part_numbers
        ctx.places, ctx.dtypes = list(gradients), [None if x is None else x.dtype for x in tensors]
        ctx.save_for_backward(*gradients.values())
        ctx.mark_non_differentiable(numbers)
        return loss, numbers

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss: Tensor, _):
        scaled: list[Tensor | None] = [None] * len(ctx.dtypes)
        for place, gradient in zip(ctx.places, ctx.saved_tensors, strict=True):
            scaled[place] = (gradient * d_loss).to(ctx.dtypes[place])
        return None, None, None, None, *scaled


def _one_chunk(
    sums: Callable, kind: Any, tensors: list[Tensor | None], into: dict[int, Tensor]
) -> tuple[Tensor, Tensor]:
    """The loss and the numbers of one chunk; its gradients are added to ``into``. All else is freed on return."""
    parts = [None if x is None else x.detach() for x in tensors]
    leaves = [parts[place].requires_grad_() for place in into]  # type: ignore[union-attr]
    num_split = len(kind._fields)
    loss, numbers = sums(kind(*parts[:num_split]), *parts[num_split:])
    if loss.requires_grad:
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        for whole, gradient in zip(into.values(), gradients, strict=True):
            if gradient is not None:
                whole.add_(gradient)
    return loss.detach(), numbers.detach()
