"""A sum over anchors and its gradient, computed one chunk of anchors at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

MAX_BYTES = 2**26
"""Default memory for the tensors of one chunk: 64 MiB."""


def anchors_per_chunk(floats_per_anchor: int, max_bytes: int, bytes_per_float: int = 4) -> int:
    """The number of anchors whose tensors fit into a memory budget, at least one.

    Raises:
        ValueError: The budget is not positive.
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes, the memory of one chunk of the loss, must be positive, not {max_bytes}")
    return max(1, max_bytes // (bytes_per_float * floats_per_anchor))


_is_shortened = ContextVar("is_shortened", default=False)


@contextmanager
def first_chunk_only() -> Iterator[None]:
    """Let losses stop after their first chunk. This is for measuring memory, which no other chunk needs more of."""
    token = _is_shortened.set(True)
    try:
        yield
    finally:
        _is_shortened.reset(token)


def chunks(length: int, size: int) -> list[slice]:
    """The parts of at most ``size`` that a loss over ``length`` items is computed in; at least one, which may be empty.

    >>> chunks(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 6, None)]
    """
    parts = [slice(start, start + size) for start in range(0, max(length, 1), size)]
    return parts[:1] if _is_shortened.get() else parts


def chunked(
    sums: Callable[..., tuple[Tensor, Tensor]],
    per_anchor: Mapping[str, Tensor],
    shared: Mapping[str, Tensor],
    size: int,
) -> tuple[Tensor, Tensor]:
    """Sum a loss over anchors while holding the intermediate tensors of only one chunk.

    If a gradient is needed, it is computed chunk by chunk in the same pass as the loss; the backward pass only
    multiplies it by the upstream gradient. Nothing is computed twice, as checkpointing would. This is correct because
    the loss is a plain sum over chunks. Tensors that ``sums`` closes over get no gradient.

    Args:
        sums: Takes, by name, a chunk of each tensor of ``per_anchor`` and all of ``shared``. Returns the chunk's loss,
            a scalar, and numbers to be summed over chunks without a gradient. Runs with autocast disabled.
        per_anchor: Tensors (A, ...), split along the anchors.
        shared: Tensors that every chunk uses completely, such as weights.
        size: Anchors per chunk.

    Returns:
        The loss, and the summed numbers, which have no gradient.
    """
    tensors = {**per_anchor, **shared}
    return _Chunked.apply(sums, size, len(per_anchor), torch.is_grad_enabled(), tuple(tensors), *tensors.values())


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sums: Callable, size: int, num_split: int, needs_gradient: bool, names: tuple, *tensors: Tensor):
        whole = dict(zip(names, tensors, strict=True))
        split = set(names[:num_split])
        gradients = {}
        for name, tensor in whole.items():
            if needs_gradient and tensor.requires_grad:  # gradients of shared tensors add up: in float32 at least
                dtype = tensor.dtype if name in split else torch.promote_types(tensor.dtype, torch.float32)
                gradients[name] = torch.zeros_like(tensor, dtype=dtype)
        loss, numbers = 0.0, 0.0
        with torch.autocast(tensors[0].device.type, enabled=False), torch.set_grad_enabled(bool(gradients)):
            for here in chunks(len(tensors[0]), size):
                parts = {name: (x[here] if name in split else x).detach() for name, x in whole.items()}
                for name in gradients:
                    parts[name].requires_grad_()
                part_loss, part_numbers = sums(**parts)
                if part_loss.requires_grad:
                    leaves = [parts[name] for name in gradients]
                    part_gradients = torch.autograd.grad(part_loss, leaves, allow_unused=True)
                    for (name, into), gradient in zip(gradients.items(), part_gradients, strict=True):
                        if gradient is not None:
                            (into[here] if name in split else into).add_(gradient)
                    del leaves, part_gradients, gradient, into
                loss, numbers = loss + part_loss.detach(), numbers + part_numbers.detach()
                del parts, part_loss, part_numbers  # freed before the next chunk is computed
        ctx.has_gradient, ctx.dtypes = [name in gradients for name in names], [x.dtype for x in tensors]
        ctx.save_for_backward(*gradients.values())
        ctx.mark_non_differentiable(numbers)
        return loss, numbers

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss: Tensor, _):
        saved = iter(ctx.saved_tensors)
        scaled = [
            (next(saved) * d_loss).to(dtype) if has else None
            for has, dtype in zip(ctx.has_gradient, ctx.dtypes, strict=True)
        ]
        return None, None, None, None, None, *scaled
