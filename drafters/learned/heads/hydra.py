"""Hydra: heads that also read the draft tokens before theirs, and trees grown level by level."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from drafters.learned.heads.heads import Block, HeadDrafter
from drafters.learned.layers.draft_cache import DraftCache
from drafters.learned.layers.transformer import TrunkLayer, rotary
from drafters.learned.parallel.drafter import check_at_least
from drafters.learned.trees import dynamic
from drafters.protocol import BaseShape, BaseWeights, Limits, StepResult
from drafters.tree import DraftTree


class PrefixAttention(nn.Module):
    """One causal decoder layer over the base's last states (Hydra++), the identity before training.

    Args:
        shape: The base's numbers.
    """

    def __init__(self, shape: BaseShape) -> None:
        super().__init__()
        self.layer, self.head_dim, self.theta = TrunkLayer(shape), shape.head_dim, shape.rope_theta
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(self.layer.self_attn.o_proj.weight)
        nn.init.zeros_(self.layer.mlp.down_proj.weight)

    def _turn(self, start: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, start + length, device=device)[None]
        cos, sin = rotary(positions, self.head_dim, self.theta)
        return cos[:, None], sin[:, None]

    def forward(self, hidden: Tensor) -> Tensor:
        """States (B, S, D) of whole texts."""
        length, attention = hidden.shape[1], self.layer.self_attn
        nothing = hidden.new_empty(len(hidden), attention.num_heads, 0, attention.head_dim)
        causal = torch.ones(length, length, dtype=torch.bool, device=hidden.device).tril()
        return self.layer(hidden, self._turn(0, length, hidden.device), nothing, nothing, causal)

    def keys_values(self, hidden: Tensor, start: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of states (1, n, D) that stand from ``start`` on, for a `DraftCache`."""
        normed, turn = self.layer.input_layernorm(hidden), self._turn(start, hidden.shape[1], hidden.device)
        return [self.layer.self_attn.keys_values(normed, turn)]

    def last(self, hidden: Tensor, before: tuple[Tensor, Tensor]) -> Tensor:
        """The state (1, 1, D) after keys and values (1, h, S, d) of all positions before it."""
        start = before[0].shape[-2]
        return self.layer(hidden, self._turn(start, 1, hidden.device), *before, None)


class Hydra(HeadDrafter):
    """Hydra (arXiv 2402.05109): Medusa's heads made sequentially dependent.

    Head k reads the base's last state before the root and the base's embeddings of the root and of the k - 1 draft
    tokens of its path; its first layer adds to the state alone, so that it begins as Medusa does. With
    ``prefix_attention``, ``distillation`` and ``num_layers: 4`` it is Hydra++. A draft is K small steps, counted as one
    draft forward: no step reads the context.

    Args:
        base: Numbers of the base; filled in by the trainer.
        num_heads: K, draft tokens after the root.
        num_layers: Residual layers of each head; 1 is Hydra's, 4 that of Hydra++.
        own_heads: Each head has an output layer of its own, as in the paper; off, all use the base's, frozen.
        prefix_attention: A decoder layer over the base's last states, whose output the heads read (Hydra++).
        distillation: Heads learn the base's whole law, not only its argmax (Hydra++).
        decay: Head k weighs decay^k in the loss; 1 is what the paper's code does.
        num_anchors: Anchors sampled from each training sequence; 0 takes every assistant position.
        chunk_anchors: Rows whose logits are held at once; lower it where memory is short.
        num_nodes: M, nodes of a draft tree at most.
        top_k: Children of an expanded node.
        width: Nodes expanded at each level, the most probable ones; with top_k it bounds what a draft costs.
    """

    decoding = frozenset({"num_nodes", "top_k", "width"})

    def __init__(
        self,
        base: BaseShape,
        num_heads: int = 5,
        num_layers: int = 1,
        own_heads: bool = True,
        prefix_attention: bool = False,
        distillation: bool = False,
        decay: float = 1.0,
        num_anchors: int = 64,
        chunk_anchors: int = 512,
        num_nodes: int = 32,
        top_k: int = 10,
        width: int = 16,
    ) -> None:
        blocks = [Block(base.hidden_size, num_layers, num_read=1 + head) for head in range(num_heads)]
        super().__init__(base, blocks, own_heads, decay, num_anchors, chunk_anchors, distillation)
        check_at_least(1, top_k=top_k, width=width)
        check_at_least(0, num_nodes=num_nodes)
        self.num_nodes, self.top_k = num_nodes, top_k
        self.width = self.rows_per_anchor = width
        self.prefix = PrefixAttention(base) if prefix_attention else None
        self._cache = DraftCache(1)

    def encode(self, hidden: Tensor) -> Tensor:
        hidden = super().encode(hidden)
        return hidden if self.prefix is None else self.prefix(hidden)

    def head_states(self, states: Tensor, path: Tensor, embedding: Tensor) -> list[Tensor]:
        read = embedding[path].flatten(1)  # (N, K * D)
        width = embedding.shape[1]
        return [block(states, read[:, : (1 + head) * width]) for head, block in enumerate(self.blocks)]

    def trees(self, states: Tensor, roots: Tensor, base_weights: BaseWeights, limits: Limits) -> list[DraftTree]:
        depth = min(limits.max_depth, self.num_heads)
        read = base_weights.embedding[roots][:, None]  # (A, W, n * D) what was read along each open path
        head = 0

        def distribution() -> Tensor:
            x = states[:, None].expand(-1, read.shape[1], -1)
            return self.logits(head, self.blocks[head](x, read), base_weights)

        def step(tokens: Tensor, slots: Tensor) -> Tensor:
            nonlocal head, read
            above = read.gather(1, slots[..., None].expand(-1, -1, read.shape[-1]))
            head, read = head + 1, torch.cat([above, base_weights.embedding[tokens]], dim=-1)
            return distribution()

        budget = min(self.num_nodes, limits.max_nodes)
        return dynamic.grow(distribution()[:, 0], step, depth, self.width, self.top_k, budget, limits.eos)

    # ---- decoding with prefix attention: its keys and values are kept

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self._cache = DraftCache(1)

    def state(self) -> Tensor:
        last = super().state()
        if self.prefix is None:
            return last
        keys, values = self._cache.read()[0]
        return self.prefix.last(last[None], (keys[..., :-1, :], values[..., :-1, :]))[0]

    @torch.inference_mode()
    def observe(self, step: StepResult) -> None:
        start = len(self._states)
        super().observe(step)
        if self.prefix is not None:
            self._cache.append(self.prefix.keys_values(torch.stack(self._states[start:])[None], start))

    def rewind(self, length: int) -> None:
        super().rewind(length)
        self._cache.truncate(len(self._states))
