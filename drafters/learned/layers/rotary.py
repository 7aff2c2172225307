"""Rotary position embedding, shared by every attention layer of the learned drafters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.protocol import BaseShape

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of the rotary angles, each (B, 1, S, d), so that they broadcast over heads."""


@dataclass(frozen=True)
class RotaryEmbedding:
    """Rotary position embedding in the layout of LLaMA.

    Args:
        head_dim: Width d of one attention head.
        theta: Base of the frequencies.
    """

    head_dim: int
    theta: float

    @classmethod
    def of(cls, shape: BaseShape) -> RotaryEmbedding:
        """The rotary embedding of a base, so that a drafter counts positions as the base does."""
        return cls(shape.head_dim, shape.rope_theta)

    def __call__(self, positions: Tensor) -> Rotation:
        """Cosine and sine for integer positions (B, S)."""
        exponents = torch.arange(0, self.head_dim, 2, device=positions.device, dtype=torch.float32) / self.head_dim
        angles = positions[..., None].float() * self.theta**-exponents
        angles = torch.cat([angles, angles], -1)[:, None]  # (B, 1, S, d)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate queries or keys (B, h, S, d) to their positions."""
    cos, sin = rotation
    left, right = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-right, left], -1) * sin.to(x.dtype)
