"""EAGLE-3: one decoder layer over several fused base layers, trained on its own output as when it drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.learned.autoregressive.drafter import AutoregressiveDrafter, Tree
from drafters.learned.layers.transformer import RMSNorm
from drafters.learned.losses import gathered_logits
from drafters.learned.losses.distillation import soft_cross_entropy
from drafters.protocol import BaseShape, BaseWeights, TrainingBatch


class EAGLE3(AutoregressiveDrafter):
    """EAGLE-3 (arXiv 2503.01840): no feature is to be met, only laws, at every depth of a draft.

    A low, a middle and a high state of the base are fused into one. One layer, which attends with it and the embedding
    of the next token side by side, gives the next state; its norm is what the head reads, and the state itself is
    what the next depth goes on from. Training unrolls that ("training-time test", section 3.2). The head is the base's
    own, frozen, over the whole vocabulary, unless ``own_head`` trains another; there is no reduced vocabulary.

    Args:
        base: Numbers of the base; filled in by the trainer.
        hidden_layers: Base layers fused; empty takes layers 2, L / 2 and L - 3 of L, of a base of fewer than eight
            layers L / 4, L / 2 and the last state.
        num_unroll: Depths that training goes through.
        decay: Weight of a depth's loss against that of the depth before.
        own_head: Whether the drafter trains a head of its own.
        depth: Levels of a draft tree, each one pass of the layer.
        width: Nodes expanded at each level.
        top_k: Children of an expanded node.
        num_nodes: M, nodes of a draft tree at most.
        min_probability: Draft tokens less probable than this are not fed to the base.
        tree: ``dynamic``, the most probable nodes found, or ``chain``, the most probable token at each level.
        draws: Children drawn at random at each link of a chain, for exact rejection; 0 takes the most probable.
        temperature: Of the law they are drawn from.
        chunk_positions: Positions whose logits are held at once in training; lower it where memory is short.
        chunk_anchors: Anchors drafted for at once in validation.
    """

    def __init__(
        self,
        base: BaseShape,
        hidden_layers: Sequence[int] = (),
        num_unroll: int = 7,
        decay: float = 0.8,
        own_head: bool = False,
        depth: int = 8,
        width: int = 10,
        top_k: int = 10,
        num_nodes: int = 60,
        min_probability: float = 0.0,
        tree: Tree = "dynamic",
        draws: int = 0,
        temperature: float = 1.0,
        chunk_positions: int = 512,
        chunk_anchors: int = 16,
    ) -> None:
        if num_unroll < 1:
            raise ValueError(f"num_unroll must be at least 1, not {num_unroll}")
        super().__init__(
            base,
            num_inputs=2,
            hidden_layers=hidden_layers or low_middle_high(base.num_layers),
            depth=depth,
            width=width,
            top_k=top_k,
            num_nodes=num_nodes,
            min_probability=min_probability,
            tree=tree,
            draws=draws,
            temperature=temperature,
            chunk_anchors=chunk_anchors,
        )
        self.num_unroll, self.decay, self.chunk_positions = num_unroll, decay, chunk_positions
        size = base.hidden_size
        self.fc = nn.Linear(len(self.required_outputs.hidden_layers) * size, size, bias=False)
        self.input_layernorm = RMSNorm(size, eps=base.norm_eps)
        self.hidden_norm = RMSNorm(size, eps=base.norm_eps)
        self.norm = RMSNorm(size, eps=base.norm_eps)
        self.lm_head = nn.Linear(size, base.vocab_size, bias=False) if own_head else None

    def enter(self, hidden: Tensor) -> Tensor:
        return self.fc(hidden)

    def pair(self, states: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        return states, torch.cat([self.input_layernorm(embedded), self.hidden_norm(states)], dim=-1)

    def read(self, states: Tensor, base_weights: BaseWeights) -> Tensor:
        normed = self.norm(states)
        return self.lm_head(normed) if self.lm_head is not None else gathered_logits.logits(normed, base_weights.head)

    def unroll(self, hidden: Tensor, tokens: Tensor, base_weights: BaseWeights, num_steps: int) -> Iterator[Tensor]:
        """The states of every depth at every position, each depth going on from the one before.

        At depth j pair p has the state that depth j - 1 gave for its position, sees the base's pairs up to p - j, and
        of each depth between the one pair on its own path.

        Args:
            hidden: (B, S, F * D). tokens: (B, S), the token after each position.

        Yields:
            (B, S, D) states of the positions after each, at depths 0, 1, ...; those of depth j mean something from
            position j on.
        """
        states, embedded = self.enter(hidden.to(self.dtype)), self.embed(tokens, base_weights)
        num_positions = tokens.shape[1]
        positions = torch.arange(num_positions, device=tokens.device)[None]
        seen: list[tuple[Tensor, Tensor]] = []
        for depth in range(num_steps):
            residual, x = self.pair(states, embedded)
            queries, *keys_values = self.layer.projected(x, positions)
            seen.append(tuple(keys_values))
            keys, values = (torch.cat(parts, dim=-2) for parts in zip(*seen, strict=True))
            mask = unroll_mask(num_positions, depth, tokens.device)
            states = self.layer(residual, F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask))
            yield states
            states = F.pad(states, (0, 0, 1, 0))[:, :-1]

    def loss(self, batch: TrainingBatch, base_weights: BaseWeights) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted mean over depths of the soft cross-entropy, where the whole path is an assistant's text."""
        assistant, last = batch.loss_mask[:, 2:], batch.last[:, 1:-1]  # pair p foresees the token of p + 2
        counts = assistant
        total, weights, losses = 0.0, 0.0, []
        for depth, states in enumerate(
            self.unroll(batch.hidden[:, :-2], batch.input_ids[:, 1:-1], base_weights, self.num_unroll)
        ):
            if depth:
                counts = assistant & F.pad(counts, (1, 0))[:, :-1]
            crossed = soft_cross_entropy(
                states[counts],
                lambda x: self.read(x, base_weights),
                last[counts],
                base_weights.head,
                self.chunk_positions,
            )
            losses.append(crossed.sum() / batch.divisor(counts.sum()))
            total, weights = total + self.decay**depth * losses[-1], weights + self.decay**depth
        return total / weights, {"first_loss": losses[0].detach(), "deepest_loss": losses[-1].detach()}


def low_middle_high(num_layers: int) -> tuple[int, ...]:
    """The base layers EAGLE-3 fuses where none are named."""
    if num_layers < 8:
        return (num_layers // 4, num_layers // 2, -1)
    return (2, num_layers // 2, num_layers - 3)


def unroll_mask(num_positions: int, depth: int, device: torch.device | None = None) -> Tensor:
    """Which pair of a depth sees which of that depth and those above it.

    Returns:
        (S, (depth + 1) * S) bool: block 0 the base's pairs, block i those of depth i.
    """
    at = torch.arange(num_positions, device=device)
    ahead = at[None] - at[:, None]  # key position - query position
    return torch.cat([ahead <= -depth, *(ahead == i - depth for i in range(1, depth + 1))], dim=-1)
