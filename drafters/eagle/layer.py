"""The decoder layer that EAGLE's drafters apply repeatedly."""

from __future__ import annotations

from torch import Tensor, nn

from drafters.nn.rotary import RotaryEmbedding
from drafters.nn.transformer import Attention, FeedForward, RMSNorm
from drafters.protocol import BaseShape


class DraftLayer(nn.Module):
    """A LLaMA decoder layer whose attention input may be wider than its residual stream.

    Args:
        shape: Dimensions of the base.
        num_inputs: Width of the attention's input, as a multiple of the hidden size.
        has_qk_norm: Whether queries and keys are normed per head.
    """

    def __init__(self, shape: BaseShape, num_inputs: int = 1, has_qk_norm: bool = False) -> None:
        super().__init__()
        self.self_attn = Attention(shape, num_inputs, has_qk_norm)
        self.mlp = FeedForward(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.rotary = RotaryEmbedding(shape)

    def queries_keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of inputs (B, S, num_inputs * D) at positions (B, S): three of (B, h, S, d)."""
        rotation = self.rotary(positions)
        return self.self_attn.queries(x, rotation), *self.self_attn.keys_values(x, rotation)

    def forward(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The layer's output (B, S, D), from its residual stream (B, S, D) and the attention result (B, h, S, d)."""
        h = residual + self.self_attn.project_output(attended)
        return h + self.mlp(self.post_attention_layernorm(h))
