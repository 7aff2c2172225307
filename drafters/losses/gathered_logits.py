"""Logits over the vocabulary with little memory: a few gathered columns, and exponentials for the normaliser."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drafters.protocol import BaseWeights


class _Exponentials(torch.autograd.Function):
    """Exponentials of logits, computed in place to save memory.

    The forward pass overwrites the logits with their exponentials, and the backward pass overwrites those with the
    gradient. So there is one tensor (A, T, V) at a time instead of four.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        picked = logits.gather(-1, columns)
        largest = logits.amax(-1, keepdim=True)
        exponentials = logits.sub_(largest).exp_()
        ctx.mark_dirty(logits)
        ctx.mark_non_differentiable(largest)
        ctx.save_for_backward(exponentials, columns)
        return exponentials, largest, picked

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
    """``left @ right.mT`` of (A, T, V) and (A, C, V): sums over the vocabulary, (A, T, C).

    The gradient that torch derives multiplies (A, V, T) by (A, T, C), which is five times as slow as its transpose;
    this one multiplies the transpose.
    """
    return _Products.apply(left, right)


def at_least_float32(x: Tensor) -> Tensor:
    """The tensor in float32, or in its own dtype if that is wider: sums over a vocabulary need the precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def logits(states: Tensor, head: Tensor) -> Tensor:
    """Logits (..., V) of states (..., D) under a frozen head (V, D).

    They are multiplied in the head's dtype and returned in float32 at least.
    """
    return at_least_float32(states.to(head.dtype) @ head.detach().T)


def base_logits(states: Tensor, base_weights: BaseWeights) -> Tensor:
    """Logits (..., V) of states (..., D) under the base's LM head, by its packed copy where there is one."""
    if base_weights.packed_head is None or states.requires_grad:
        return logits(states, base_weights.head)
    return at_least_float32(base_weights.packed_head(states.to(base_weights.head.dtype)))


def exponentials(logits: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turn logits z (A, T, V) into exponentials in place; the backward pass overwrites those and can run only once.

    Returns ``exponentials`` (A, T, V), exp(z - max z); ``largest`` (A, T, 1), max z, without a gradient because no
    result should depend on it; and ``picked`` (A, T, K), z at the columns (A, T, K).
    """
    return _Exponentials.apply(logits, columns)


def log_sum(exponentials: Tensor, largest: Tensor) -> Tensor:
    """log sum_v exp z_v, (A, T, 1), from the results of `exponentials`."""
    return exponentials.sum(-1, keepdim=True).log() + largest
