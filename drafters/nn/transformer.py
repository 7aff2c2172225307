"""Transformer layers of the learned drafters: rotary positions, attention over a context and a block, and the trunk."""

from dataclasses import dataclass
from math import pi
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drafters.nn.anchor_attention import Mask, attend, extended
from drafters.nn.draft_cache import Context
from drafters.protocol import BaseShape

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of the rotary angles, each (B, 1, S, d), so that they broadcast over heads."""


@dataclass(frozen=True)
class RotaryEmbedding:
    """Rotary position embedding in the layout of LLaMA, with Llama 3's scaling for a drafter trained with it."""

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


class RMSNorm(nn.RMSNorm):
    """RMS norm that computes in the dtype of its weight, which under autocast is not that of the states."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class Attention(nn.Module):
    """Multi-head attention whose keys and values may come from a context as well as from the block itself.

    Queries, keys and values are projected from an input of ``num_inputs`` times the hidden size. Queries and keys may
    be normalised per head, as in Qwen3; LLaMA does not. ``num_key_heads`` heads have keys and values, each for several
    heads with queries; None stands for all heads.
    """

    def __init__(
        self, shape: BaseShape, num_inputs: int = 1, has_qk_norm: bool = True, num_key_heads: int | None = None
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim, width = shape.num_heads, shape.head_dim, shape.num_heads * shape.head_dim
        self.num_key_heads = num_key_heads or shape.num_heads
        widths = width, *[self.num_key_heads * shape.head_dim] * 2
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(shape.hidden_size, size, bias=False) for size in widths)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)
        if num_inputs > 1:
            # Drawn again instead of built wide at once: a seed then gives the weights it has always given, and the
            # published EAGLE-3 results can be reproduced.
            wide = (nn.Linear(num_inputs * shape.hidden_size, width, bias=False) for _ in range(3))
            self.q_proj, self.k_proj, self.v_proj = wide
        self.q_norm = RMSNorm(shape.head_dim, eps=shape.norm_eps) if has_qk_norm else nn.Identity()
        self.k_norm = RMSNorm(shape.head_dim, eps=shape.norm_eps) if has_qk_norm else nn.Identity()

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)  # (B, S, h * d) -> (B, h, S, d)

    def keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Rotated keys and values of inputs (B, S, num_inputs * D): two tensors of (B, key heads, S, d)."""
        return rotate(self.k_norm(self._split_heads(self.k_proj(x))), rotation), self._split_heads(self.v_proj(x))

    def queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Rotated queries (B, h, S, d) of inputs (B, S, num_inputs * D)."""
        return rotate(self.q_norm(self._split_heads(self.q_proj(x))), rotation)

    def project_output(self, attended: Tensor) -> Tensor:
        """Merge the heads of an attention result (B, h, S, d) and project it to (B, S, D)."""
        return self.o_proj(attended.transpose(-3, -2).flatten(-2))


class FeedForward(nn.Module):
    """The SwiGLU feed-forward layer of LLaMA."""

    def __init__(self, shape: BaseShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TrunkLayer(nn.Module):
    """One decoder layer whose attention also reads a context."""

    def __init__(self, shape: BaseShape, num_key_heads: int | None = None, has_qk_norm: bool = True) -> None:
        super().__init__()
        self.self_attn = Attention(shape, has_qk_norm=has_qk_norm, num_key_heads=num_key_heads)
        self.mlp = FeedForward(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, eps=shape.norm_eps)

    def forward(self, x: Tensor, rotation: Rotation, keys: Tensor, values: Tensor, mask: Mask) -> Tensor:
        """Run the layer over frames (B, Q, D).

        They attend to the context's keys and values (B, h, S, d) and to each other, where the mask (B, 1, Q, S + Q)
        allows it, or as a `CacheMask` says.
        """
        normed = self.input_layernorm(x)
        block_keys, block_values = self.self_attn.keys_values(normed, rotation)
        queries = self.self_attn.queries(normed, rotation)
        keys, values = extended(keys, block_keys, mask), extended(values, block_values, mask)
        h = x + self.self_attn.project_output(attend(queries, keys, values, mask))
        return h + self.mlp(self.post_attention_layernorm(h))


class Trunk(nn.Module):
    """Decoder layers over a block of frames, each reading keys and values projected from the base's hidden states.

    This is the layout of DFlash (arXiv 2602.06036): the hidden states of several base layers are concatenated, fused by
    one projection, and give every trunk layer its context. A trunk that reads tokens has the normed embedding of each
    position's token concatenated too.
    """

    is_recomputed = False  # activation checkpointing: keep only the inputs of each layer for the backward pass

    def __init__(
        self,
        shape: BaseShape,
        num_layers: int,
        num_fused: int,
        reads_tokens: bool = False,
        num_key_heads: int | None = None,
        fusion_rank: int | None = None,
    ) -> None:
        super().__init__()
        self.rotary = RotaryEmbedding(shape)
        num_inputs, size = (num_fused + reads_tokens) * shape.hidden_size, shape.hidden_size
        self.fc: nn.Module = nn.Linear(num_inputs, fusion_rank or size, bias=False)
        if fusion_rank:
            self.fc = nn.Sequential(self.fc, nn.Linear(fusion_rank, size, bias=False))
        self.token_norm = RMSNorm(shape.hidden_size, eps=shape.norm_eps) if reads_tokens else None
        self.hidden_norm = RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.layers = nn.ModuleList(TrunkLayer(shape, num_key_heads) for _ in range(num_layers))
        self.norm: nn.Module = RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def context(self, hidden: Tensor, positions: Tensor, embedded: Tensor | None = None) -> Context:
        """Keys and values of base hidden states (B, S, F * D) at positions (B, S), for each layer.

        A trunk that reads tokens needs their embeddings (B, S, D), too.
        """
        if self.token_norm is not None:
            assert embedded is not None, "the trunk reads tokens, and their embeddings were not given"
            hidden = torch.cat([hidden, self.token_norm(embedded).to(hidden.dtype)], dim=-1)
        context, rotation = self.hidden_norm(self.fc(hidden)), self.rotary(positions)
        layers = cast("list[TrunkLayer]", list(self.layers))
        return [layer.self_attn.keys_values(context, rotation) for layer in layers]

    def forward(self, frames: Tensor, positions: Tensor, context: Context, mask: Mask = None) -> Tensor:
        """Run frames (B, Q, D) at positions (B, Q); the mask (B, 1, Q, S + Q) is true where a frame may attend."""
        rotation = self.rotary(positions)
        of_layers = context[: len(self.layers)]  # an `AttentionDraftModule` has its states behind them
        for layer, (keys, values) in zip(self.layers, of_layers, strict=True):
            inputs = frames, rotation, keys, values, mask
            if self.is_recomputed and torch.is_grad_enabled():
                frames = checkpoint(layer, *inputs, use_reentrant=False)
            else:
                frames = layer(*inputs)
        return self.norm(frames)


class AttentionDraftModule(Trunk):
    """The draft module of CTC-drafter (section 3.1): one LLaMA layer over the base's hidden states.

    They enter the layer as they are, and the frames stand behind them, as further positions. A frame's input has the
    last state in it. So queries, keys and values come from the states by the same norm, and the residual stream runs
    from the last state to the LM head, without a norm at its end, as in the authors' code.
    """

    def __init__(self, shape: BaseShape, num_key_heads: int | None = None) -> None:
        super(Trunk, self).__init__()
        self.rotary = RotaryEmbedding(shape)
        self.layers = nn.ModuleList([TrunkLayer(shape, num_key_heads, has_qk_norm=False)])
        self.norm = nn.Identity()
        self._initialise()

    def context(self, hidden: Tensor, positions: Tensor, embedded: Tensor | None = None) -> Context:
        """Keys and values of base hidden states (B, S, D) at positions (B, S), and then the states (B, 1, S, D)."""
        layer = cast("TrunkLayer", self.layers[0])
        keys_values = layer.self_attn.keys_values(layer.input_layernorm(hidden), self.rotary(positions))
        return [keys_values, (hidden[:, None],)]
