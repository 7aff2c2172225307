"""Hydra: heads that also read the draft tokens before theirs, and trees grown level by level."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from drafters.checks import check_at_least
from drafters.medusa import HeadDrafter, HeadLossOptions, HeadOptions, ResidualBlock
from drafters.nn.anchor_attention import CacheMask, Mask
from drafters.nn.draft_cache import Context, Root
from drafters.nn.table import Table
from drafters.nn.transformer import RotaryEmbedding, TrunkLayer
from drafters.protocol import BaseShape, BaseWeights, Limits
from drafters.registry import register
from drafters.tree import DraftTree
from drafters.trees import dynamic


@dataclass(frozen=True)
class HydraHeadOptions(HeadOptions):
    """Hydra's heads.

    Args:
        prefix_attention: Let the heads read the output of a decoder layer over the base's last hidden states (Hydra++)
            instead of those states.
    """

    prefix_attention: bool = False


@dataclass(frozen=True)
class HydraLossOptions(HeadLossOptions):
    """Hydra's loss.

    Args:
        noise: In training the base's hidden states get uniform noise of up to noise / sqrt(S * D), as the embeddings
            in NEFTune (arXiv 2310.05914).
    """

    decay: float = 1.0
    noise: float = 0.0


@dataclass(frozen=True)
class HydraDraftOptions:
    """How Hydra's heads become a draft tree; decoding may change these options.

    Args:
        num_nodes: M, largest number of nodes in a draft tree.
        top_k: Children of an expanded node.
        width: Nodes expanded at each level, the most probable ones. With top_k it bounds the cost of a draft.
    """

    num_nodes: int = 32
    top_k: int = 10
    width: int = 16

    def __post_init__(self) -> None:
        check_at_least(1, top_k=self.top_k, width=self.width)
        check_at_least(0, num_nodes=self.num_nodes)


class PrefixAttention(nn.Module):
    """One causal decoder layer over the base's last hidden states (Hydra++), the identity before training."""

    def __init__(self, shape: BaseShape) -> None:
        super().__init__()
        self.layer, self.rotary = TrunkLayer(shape), RotaryEmbedding(shape)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(self.layer.self_attn.o_proj.weight)
        nn.init.zeros_(self.layer.mlp.down_proj.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return output states (B, S, D) for states (B, S, D) of complete texts."""
        length, attention = hidden.shape[1], self.layer.self_attn
        nothing = hidden.new_empty(len(hidden), attention.num_heads, 0, attention.head_dim)
        causal = torch.ones(length, length, dtype=torch.bool, device=hidden.device).tril()
        rotation = self.rotary(torch.arange(length, device=hidden.device)[None])
        return self.layer(hidden, rotation, nothing, nothing, causal)

    def keys_values(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (1, h, n, d) of states (1, n, D) at positions (1, n), for a `DraftCache`."""
        return self.layer.self_attn.keys_values(self.layer.input_layernorm(hidden), self.rotary(positions))

    def last_output(self, hidden: Tensor, position: Tensor, keys: Tensor, values: Tensor, mask: Mask = None) -> Tensor:
        """Output (1, 1, D) of the last state (1, 1, D), given keys and values (1, h, S, d) of all earlier positions."""
        return self.layer(hidden, self.rotary(position), keys, values, mask)


@register("hydra")
class Hydra(HeadDrafter):
    """Hydra (arXiv 2402.05109): Medusa's heads made sequentially dependent.

    Head k reads the base's last hidden state before the root, and the base's embeddings of the root and of the k - 1
    draft tokens on its path; before training it passes the state on, like Medusa's. Hydra++ is the same with
    ``prefix_attention``, ``distillation`` and ``num_layers: 4``. A draft is K small steps, counted as one draft forward
    because no step reads the context.
    """

    def __init__(
        self,
        base: BaseShape,
        heads: HydraHeadOptions = HydraHeadOptions(),
        loss: HydraLossOptions = HydraLossOptions(),
        draft: HydraDraftOptions = HydraDraftOptions(),
    ) -> None:
        blocks = [ResidualBlock(base.hidden_size, heads.num_layers, 1 + head) for head in range(heads.num_heads)]
        super().__init__(base, blocks, heads, loss)
        self.draft_options, self.noise = draft, loss.noise
        # Each goes through an LM head with so many rows.
        self.anchors_at_once = max(1, self.anchors_at_once // draft.width)
        self.prefix = PrefixAttention(base) if heads.prefix_attention else None

    def encode(self, hidden: Tensor) -> Tensor:
        hidden = super().encode(hidden)
        if self.training and self.noise:
            hidden = hidden + (2 * torch.rand_like(hidden) - 1) * (self.noise / hidden[0].numel() ** 0.5)
        return hidden if self.prefix is None else self.prefix(hidden)

    def head_states(self, states: Tensor, path: Tensor, embedding: Tensor) -> list[Tensor]:
        embeddings = embedding[path].flatten(1)  # (N, K * D)
        width = embedding.shape[1]
        return [block(states, embeddings[:, : (1 + head) * width]) for head, block in enumerate(self.blocks)]

    def table(self, states: Tensor, roots: Tensor, base_weights: BaseWeights, limits: Limits | Root) -> Table:
        embeddings = base_weights.embedding[roots][:, None]  # (A, W, n * D) along the path of each expanded node
        head = 0

        def head_logits() -> Tensor:
            x = states[:, None].expand(-1, embeddings.shape[1], -1)
            return self.logits(head, self.blocks[head](x, embeddings), base_weights)

        def step(tokens: Tensor, slots: Tensor) -> Tensor:
            nonlocal head, embeddings
            above = embeddings.gather(1, slots[..., None].expand(-1, -1, embeddings.shape[-1]))
            head, embeddings = head + 1, torch.cat([above, base_weights.embedding[tokens]], dim=-1)
            return head_logits()

        options, depth = self.draft_options, min(limits.max_depth, self.num_heads)
        return dynamic.grow(head_logits()[:, 0], step, options.width, options.top_k, depth, limits.eos)

    def trees_from(self, parts: list[np.ndarray], limits: Limits) -> list[DraftTree]:
        return dynamic.best_nodes(parts, limits, self.draft_options.num_nodes)

    # ---- decoding with prefix attention, whose keys and values are cached too

    def cached(self, hidden: Tensor, positions: Tensor, tokens: Tensor | None, base_weights: BaseWeights) -> Context:
        states = super().cached(hidden, positions, tokens, base_weights)
        return states if self.prefix is None else [*states, self.prefix.keys_values(states[0][0][:, 0], positions)]

    def state(self, context: Context, root: Root) -> Tensor:
        last_hidden = super().state(context, root)
        if self.prefix is None:
            return last_hidden
        (keys, values), position, mask = context[1], root.position - 1, None
        if root.first is None:
            keys, values = keys[..., :-1, :], values[..., :-1, :]
        else:  # its own keys and values are in the cache, and are written there again
            mask = CacheMask(root.first[0], position[0], 1, keys.shape[-2])
        return self.prefix.last_output(last_hidden[None], position, keys, values, mask)[0]
