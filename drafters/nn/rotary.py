"""Rotary position embedding, shared by every attention layer of the learned drafters."""

from __future__ import annotations

from dataclasses import dataclass
from math import pi

import torch
from torch import Tensor

from drafters.protocol import BaseShape

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of the rotary angles, each (B, 1, S, d), so that they broadcast over heads."""


@dataclass(frozen=True)
class RotaryEmbedding:
    """Rotary position embedding in the layout of LLaMA, with Llama 3's scaling for a drafter that was trained with it.

    Args:
        shape: Its width of a head, base of the frequencies, and scaling are used.
    """

    shape: BaseShape

    def frequencies(self, device: torch.device) -> Tensor:
        """Radians per position (d / 2,)."""
        shape = self.shape
        exponents = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32) / shape.head_dim
        frequencies = shape.rope_theta**-exponents
        if shape.rope_factor == 1:
            return frequencies
        turns = frequencies * shape.rope_original_length / (2 * pi)
        low, high = shape.rope_low_frequency, shape.rope_high_frequency
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / shape.rope_factor)

    def __call__(self, positions: Tensor) -> Rotation:
        """Cosine and sine for integer positions (B, S)."""
        angles = positions[..., None].float() * self.frequencies(positions.device)
        angles = torch.cat([angles, angles], -1)[:, None]  # (B, 1, S, d)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate queries or keys (B, h, S, d) to their positions."""
    cos, sin = rotation
    left, right = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-right, left], -1) * sin.to(x.dtype)
