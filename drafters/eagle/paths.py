"""The decoder layer of EAGLE's drafters, and its drafts: beams of nodes below each root, with tree attention."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from drafters.nn.transformer import Attention, FeedForward, RMSNorm, RotaryEmbedding
from drafters.protocol import BaseShape, BaseWeights


class DraftLayer(nn.Module):
    """A LLaMA decoder layer whose attention input is ``num_inputs`` times as wide as its residual stream.

    Queries and keys may be normed per head.
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


class DraftModule(Protocol):
    """The part of an autoregressive drafter that `Paths` calls."""

    @property
    def layer(self) -> DraftLayer: ...
    def embed(self, tokens: Tensor, base_weights: BaseWeights) -> Tensor: ...
    def pair(self, states: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]: ...
    def read(self, states: Tensor, base_weights: BaseWeights) -> Tensor: ...


@dataclass(eq=False)
class Paths:
    """Beams of nodes below A roots of one text, extended level by level.

    A node attends to the pairs before its root, which all roots share, to its ancestors and to itself, or to those of
    them that are in its window. W is the size of the latest beam, N the number of nodes in all beams.
    """

    module: DraftModule  # its layer runs once per level
    base_weights: BaseWeights
    # Keys and values of the text's pairs, two of (1, h, S, d); those of the last pairs suffice if they fill the window
    # and there is a single root.
    context: tuple[Tensor, Tensor]
    anchors: Tensor  # (A,) positions of the roots
    visible: Tensor | None = None  # (A, S) bool, which pairs come before each root; all of them by default
    window: int = 0  # number of pairs that a node attends to, its own included; 0 for all

    def __post_init__(self) -> None:
        anchors = self.anchors
        self.context_keys, self.context_values = (states[0] for states in self.context)  # (h, S, d)
        num_heads, _, head_dim = self.context_keys.shape
        self.keys = self.values = self.context_keys.new_empty(len(anchors), num_heads, 0, head_dim)  # (A, h, N, d)
        self.ancestor_mask = torch.empty(len(anchors), 1, 0, dtype=torch.bool, device=anchors.device)  # (A, W, N)
        self.only_slot = torch.zeros(len(anchors), 1, dtype=torch.long, device=anchors.device)
        self.num_passes = 0  # also the depth of the next level below the roots

    def start(self, residual: Tensor, inputs: Tensor) -> Tensor:
        """Logits (A, V) at the roots, from the last pair before each: residual stream and attention input (A, 1, ·)."""
        rotation = self.module.layer.rotary(self.anchors[:, None] - 1)
        return self._run(residual, self.module.layer.self_attn.queries(inputs, rotation))[:, 0]

    def step(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """Logits (A, W, V) below the tokens (A, W) of the next beam, each below a slot (A, W) of the latest one."""
        module, width = self.module, tokens.shape[1]
        states = self.states.gather(1, slots[..., None].expand(-1, -1, self.states.shape[-1]))
        residual, x = module.pair(states, module.embed(tokens, self.base_weights))
        positions = (self.anchors + self.num_passes - 1)[:, None].expand(-1, width)
        queries, keys, values = module.layer.queries_keys_values(x, positions)
        self.keys, self.values = torch.cat([self.keys, keys], -2), torch.cat([self.values, values], -2)
        above = self.ancestor_mask.gather(1, slots[..., None].expand(-1, -1, self.ancestor_mask.shape[-1]))
        itself = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
        self.ancestor_mask = torch.cat([above, itself], dim=-1)
        return self._run(residual, queries)

    def _run(self, residual: Tensor, queries: Tensor) -> Tensor:
        self.states = self.module.layer(residual, self._attend(queries))
        self.num_passes += 1
        return self.module.read(self.states, self.base_weights)

    def _attend(self, queries: Tensor) -> Tensor:
        """Attention of queries (A, h, W, d) over the text's pairs and the beams.

        The pairs are shared by all roots, so all queries are multiplied with them at once and nothing is copied.
        """
        context_keys, context_values, visible = self._context_in_window()
        shape, num_pairs = queries.shape, context_keys.shape[1]
        together = queries.transpose(0, 1).flatten(1, 2)  # (h, A * W, d)
        shared = (together @ context_keys.mT).unflatten(1, (shape[0], shape[2])).transpose(0, 1)  # (A, h, W, S)
        if visible is not None:
            shared = shared.masked_fill(~visible[:, None, None], -torch.inf)
        own = (queries @ self.keys.mT).masked_fill(~self.ancestor_mask[:, None], -torch.inf)  # (A, h, W, N)
        scores = torch.cat([shared, own], dim=-1) * shape[-1] ** -0.5
        weights = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1).to(queries.dtype)
        context = weights[..., :num_pairs].transpose(0, 1).flatten(1, 2) @ context_values  # (h, A * W, d)
        return context.unflatten(1, (shape[0], shape[2])).transpose(0, 1) + weights[..., num_pairs:] @ self.values

    def _context_in_window(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values (h, S, d) of the text's pairs, and which of them (A, S) each root's nodes may attend to.

        The query of pass n is n positions behind the last pair of the text, and its path has n pairs of its own.
        """
        keys, values, visible = self.context_keys, self.context_values, self.visible
        if not self.window:
            return keys, values, visible
        if visible is None:
            first = max(0, keys.shape[1] + self.num_passes - self.window)
            return keys[:, first:], values[:, first:], None
        first_visible = self.anchors + self.num_passes - self.window
        return keys, values, visible & (torch.arange(keys.shape[1], device=keys.device) >= first_visible[:, None])
