"""What a loss needs of the logits over the vocabulary: a few columns, and the exponentials the rest is summed from."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Exponentials(torch.autograd.Function):
    """Written over the logits, and in the backward pass over themselves: one (a, T, V) is alive, not four."""

    @staticmethod
    def forward(ctx, logits: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        picked = logits.gather(-1, columns)
        most = logits.amax(-1, keepdim=True)
        exponentials = logits.sub_(most).exp_()
        ctx.mark_dirty(logits)
        ctx.mark_non_differentiable(most)
        ctx.save_for_backward(exponentials, columns)
        return exponentials, most, picked

    @staticmethod
    @once_differentiable
    def backward(ctx, d_exponentials: Tensor, _, d_picked: Tensor) -> tuple[Tensor, None]:
        exponentials, columns = ctx.saved_tensors
        return exponentials.mul_(d_exponentials).scatter_add_(-1, columns, d_picked), None


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        return left @ right.mT

    @staticmethod
    @once_differentiable
    def backward(ctx, d_products: Tensor) -> tuple[Tensor, Tensor]:
        left, right = ctx.saved_tensors
        return d_products @ right, d_products.mT @ left


def products(left: Tensor, right: Tensor) -> Tensor:
    """Sums over the vocabulary of (A, T, V) times (A, C, V): (A, T, C).

    As ``left @ right.mT``, whose own gradient multiplies (A, V, T) by (A, T, C), five times as slow as its mirror.
    """
    return _Products.apply(left, right)


def wide(x: Tensor) -> Tensor:
    """In float32 at the least: sums over a vocabulary need it."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def logits(states: Tensor, head: Tensor) -> Tensor:
    """What the frozen head (V, D) reads from states (..., D): multiplied in its format, (..., V) at least float32."""
    return wide(states.to(head.dtype) @ head.detach().T)


def exponentials(logits: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Take logits apart in their own memory.

    The logits are used up. So are the exponentials, once, by the backward pass.

    Args:
        logits: (A, T, V). columns: (A, T, K) indices into V.

    Returns:
        ``exponentials`` (A, T, V), exp(z - max z); ``most`` (A, T, 1), max z, without gradient, as no result should
        depend on it; and ``picked`` (A, T, K), z at the columns.
    """
    return _Exponentials.apply(logits, columns)


def log_sum(exponentials: Tensor, most: Tensor) -> Tensor:
    """log sum_v exp z_v (A, T, 1) from what ``exponentials`` gave."""
    return exponentials.sum(-1, keepdim=True).log() + most


@torch.no_grad()
def teacher_distribution(states: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """The base's law at the positions of its last states (A, U, D), and its negative entropy in nats.

    Returns:
        (A, U, V) and (A, U).
    """
    scores = logits(states, head)
    distribution = scores.softmax(-1)
    return distribution, torch.einsum("auv,auv->au", distribution, scores) - scores.logsumexp(-1)
