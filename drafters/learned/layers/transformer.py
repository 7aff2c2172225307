"""The trunk of block drafters: frames attend to the base's hidden states and to their own block (DFlash layout)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drafters.learned.layers.anchor_attention import Mask, attend
from drafters.protocol import BaseShape


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary embedding at integer positions (...): two of (..., head_dim)."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[..., None].float() * theta**-exponents
    return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn (..., heads, positions, head_dim) by (..., positions, head_dim)."""
    left, right = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-right, left], -1) * sin.to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """In the format of its weight, which is float32 in training: under autocast states come in bfloat16, and the fused
    kernel takes one format alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class Attention(nn.Module):
    """Queries from the block; keys and values from the context and the block."""

    def __init__(self, shape: BaseShape) -> None:
        super().__init__()
        self.num_heads, self.head_dim, width = shape.num_heads, shape.head_dim, shape.num_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, eps=shape.norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, eps=shape.norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(-3, -2)  # (B, S, D) -> (B, h, S, d)

    def keys_values(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys, turned to their positions, and values of (B, S, D): two of (B, h, S, d)."""
        return rotate(self.k_norm(self._heads(self.k_proj(x))), *turn), self._heads(self.v_proj(x))

    def queries(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        return rotate(self.q_norm(self._heads(self.q_proj(x))), *turn)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Mask) -> Tensor:
        return self.o_proj(attend(queries, keys, values, mask).transpose(-3, -2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, shape: BaseShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TrunkLayer(nn.Module):
    """One decoder layer whose attention also reads the context."""

    def __init__(self, shape: BaseShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, eps=shape.norm_eps)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, mask: Mask) -> Tensor:
        """Frames (B, Q, D) attend to context keys and values (B, h, S, d) and to each other, as far as the mask
        (B, 1, Q, S + Q) lets them."""
        normed = self.input_layernorm(x)
        block_keys, block_values = self.self_attn.keys_values(normed, turn)
        queries = self.self_attn.queries(normed, turn)
        keys, values = torch.cat([keys, block_keys], -2), torch.cat([values, block_values], -2)
        h = x + self.self_attn.attend(queries, keys, values, mask)
        return h + self.mlp(self.post_attention_layernorm(h))


class Trunk(nn.Module):
    """Layers over a block of frames, each reading keys and values projected from fused base hidden states.

    Args:
        shape: The base's numbers.
        num_layers: Trunk layers.
        num_fused: F, base layers concatenated as context.
    """

    is_recomputed = False  # whether the backward pass computes the layers again, of which only the inputs are kept

    def __init__(self, shape: BaseShape, num_layers: int, num_fused: int) -> None:
        super().__init__()
        self.head_dim, self.theta = shape.head_dim, shape.rope_theta
        self.fc = nn.Linear(num_fused * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.layers = nn.ModuleList(TrunkLayer(shape) for _ in range(num_layers))
        self.norm = RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotation of integer positions (B, S), ready to broadcast over heads: two of (B, 1, S, d)."""
        cos, sin = rotary(positions, self.head_dim, self.theta)
        return cos[:, None], sin[:, None]

    def context(self, hidden: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Per layer, keys and values of base hidden states (B, S, F * D) at positions (B, S)."""
        context, turn = self.hidden_norm(self.fc(hidden)), self.turn(positions)
        return [layer.self_attn.keys_values(context, turn) for layer in self.layers]

    def forward(
        self,
        frames: Tensor,
        positions: Tensor,
        context: list[tuple[Tensor, Tensor]],
        mask: Mask = None,
    ) -> Tensor:
        """Run frames (B, Q, D) at positions (B, Q); the mask (B, 1, Q, S + Q) is true where a frame may look."""
        turn = self.turn(positions)
        for layer, (keys, values) in zip(self.layers, context, strict=True):
            given = frames, turn, keys, values, mask
            keeps_all = not (self.is_recomputed and torch.is_grad_enabled())
            frames = layer(*given) if keeps_all else checkpoint(layer, *given, use_reentrant=False)
        return self.norm(frames)
