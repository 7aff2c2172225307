"""EAGLE: one decoder layer that foresees the base's last hidden states, one after another."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.learned.autoregressive.drafter import AutoregressiveDrafter, Tree
from drafters.learned.losses import gathered_logits
from drafters.learned.losses.distillation import soft_cross_entropy
from drafters.protocol import BaseShape, BaseWeights, TrainingBatch


class EAGLE(AutoregressiveDrafter):
    """EAGLE (arXiv 2401.15077) with the dynamic draft tree of EAGLE-2 (arXiv 2406.16858).

    Position p's last hidden state, the feature the base's head reads, is joined with the embedding of token p + 1; one
    LLaMA layer makes of it the feature of position p + 1, which the frozen head reads as the law of token p + 2.
    Training knows every feature of a text; below the root the layer goes on from its own.

    Args:
        base: Numbers of the base; filled in by the trainer.
        depth: Levels of a draft tree, each one pass of the layer.
        width: Nodes expanded at each level.
        top_k: Children of an expanded node.
        num_nodes: M, nodes of a draft tree at most.
        min_probability: Draft tokens less probable than this are not fed to the base.
        tree: ``dynamic``, the most probable nodes found, or ``chain``, the most probable token at each level.
        draws: Children drawn at random at each link of a chain, for exact rejection; 0 takes the most probable.
        temperature: Of the law they are drawn from.
        feature_weight: Weight of the features' smooth L1 distance in the loss.
        token_weight: Weight of the soft cross-entropy between the base's law and the drafter's.
        noise: Width of the uniform noise on training features, times 512 / S.
        chunk_positions: Positions whose logits are held at once in training; lower it where memory is short.
        chunk_anchors: Anchors drafted for at once in validation.
    """

    def __init__(
        self,
        base: BaseShape,
        depth: int = 6,
        width: int = 10,
        top_k: int = 10,
        num_nodes: int = 60,
        min_probability: float = 0.0,
        tree: Tree = "dynamic",
        draws: int = 0,
        temperature: float = 1.0,
        feature_weight: float = 1.0,
        token_weight: float = 0.1,
        noise: float = 0.2,
        chunk_positions: int = 512,
        chunk_anchors: int = 16,
    ) -> None:
        super().__init__(
            base,
            num_inputs=1,
            hidden_layers=(-1,),
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
        self.feature_weight, self.token_weight, self.noise = feature_weight, token_weight, noise
        self.chunk_positions = chunk_positions
        self.fc = nn.Linear(2 * base.hidden_size, base.hidden_size)

    def enter(self, hidden: Tensor) -> Tensor:
        return hidden

    def pair(self, states: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat([embedded, states], dim=-1))
        return x, x  # EAGLE's layer has no norm before attention

    def read(self, states: Tensor, base_weights: BaseWeights) -> Tensor:
        return gathered_logits.logits(states, base_weights.head)

    def loss(self, batch: TrainingBatch, base_weights: BaseWeights) -> tuple[Tensor, dict[str, Tensor]]:
        """Section 3.2: features and laws at every position whose next token is an assistant's."""
        given = batch.hidden[:, :-2].to(self.dtype)  # pair p foresees the feature of p + 1 and the token of p + 2
        if self.training and self.noise:
            given = given + (torch.rand_like(given) - 0.5) * (self.noise * 512 / batch.hidden.shape[1])
        foreseen = self(given, batch.input_ids[:, 1:-1], base_weights)
        counts = batch.loss_mask[:, 2:]
        foreseen, features = foreseen[counts], batch.hidden[:, 1:-1][counts]  # (N, D)
        num = batch.divisor(counts.sum())
        distance = F.smooth_l1_loss(foreseen, features.to(foreseen.dtype), reduction="none").mean(-1).sum() / num
        crossed = soft_cross_entropy(
            foreseen, lambda states: self.read(states, base_weights), features, base_weights.head, self.chunk_positions
        )
        token_loss = crossed.sum() / num
        loss = self.feature_weight * distance + self.token_weight * token_loss
        return loss, {"feature_loss": distance.detach(), "token_loss": token_loss.detach()}
