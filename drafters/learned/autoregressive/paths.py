"""What an autoregressive draft module has seen below each root, and its next pass: tree attention over paths."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drafters.protocol import BaseWeights

if TYPE_CHECKING:
    from drafters.learned.autoregressive.drafter import AutoregressiveDrafter


class Paths:
    """Beams of nodes below A roots of one text, level by level.

    A node sees the pairs before its root, which all roots share, its ancestors, and itself. W is the size of the last
    beam, N the number of nodes of all beams.

    Args:
        drafter: Whose layer runs.
        borrowed: The base's embedding and head.
        context: Keys and values of the text's pairs, two of (1, h, S, d).
        anchors: (A,) positions of the roots.
        visible: (A, S) bool, which of the pairs stand before each root; all, if not given.
    """

    def __init__(
        self,
        drafter: AutoregressiveDrafter,
        base_weights: BaseWeights,
        context: tuple[Tensor, Tensor],
        anchors: Tensor,
        visible: Tensor | None = None,
    ) -> None:
        self.drafter, self.base_weights, self.anchors, self.visible = drafter, base_weights, anchors, visible
        self.context_keys, self.context_values = context[0][0], context[1][0]  # (h, S, d)
        num_heads, _, head_dim = self.context_keys.shape
        self.keys = self.values = self.context_keys.new_empty(len(anchors), num_heads, 0, head_dim)  # (A, h, N, d)
        self.sees = torch.empty(len(anchors), 1, 0, dtype=torch.bool, device=anchors.device)  # (A, W, N)
        self.only_slot = torch.zeros(len(anchors), 1, dtype=torch.long, device=anchors.device)
        self.num_passes = 0  # which is also the depth below the roots of the next level

    def start(self, residual: Tensor, inputs: Tensor) -> Tensor:
        """Logits (A, V) at the roots, given (A, 1, ·) what the layer makes of the last pair before each."""
        turn = self.drafter.layer.turn(self.anchors[:, None] - 1)
        return self._run(residual, self.drafter.layer.self_attn.queries(inputs, turn))[:, 0]

    def step(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """Logits (A, W, V) below the tokens (A, W) of a next beam, each a child of a slot (A, W) of the last one."""
        drafter, width = self.drafter, tokens.shape[1]
        states = self.states.gather(1, slots[..., None].expand(-1, -1, self.states.shape[-1]))
        residual, x = drafter.pair(states, drafter.embed(tokens, self.base_weights))
        positions = (self.anchors + self.num_passes - 1)[:, None].expand(-1, width)
        queries, keys, values = drafter.layer.projected(x, positions)
        self.keys, self.values = torch.cat([self.keys, keys], -2), torch.cat([self.values, values], -2)
        above = self.sees.gather(1, slots[..., None].expand(-1, -1, self.sees.shape[-1]))
        itself = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
        self.sees = torch.cat([above, itself], dim=-1)
        return self._run(residual, queries)

    def _run(self, residual: Tensor, queries: Tensor) -> Tensor:
        self.states = self.drafter.layer(residual, self._attend(queries))
        self.num_passes += 1
        return self.drafter.read(self.states, self.base_weights)

    def _attend(self, queries: Tensor) -> Tensor:
        """What queries (A, h, W, d) find among the text's pairs, which are not copied for each root, and their own."""
        shape, num_pairs = queries.shape, self.context_keys.shape[1]
        together = queries.transpose(0, 1).flatten(1, 2)  # (h, A * W, d)
        shared = (together @ self.context_keys.mT).unflatten(1, (shape[0], shape[2])).transpose(0, 1)  # (A, h, W, S)
        if self.visible is not None:
            shared = shared.masked_fill(~self.visible[:, None, None], -torch.inf)
        own = (queries @ self.keys.mT).masked_fill(~self.sees[:, None], -torch.inf)  # (A, h, W, N)
        scores = torch.cat([shared, own], dim=-1) * shape[-1] ** -0.5
        weights = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1).to(queries.dtype)
        found = weights[..., :num_pairs].transpose(0, 1).flatten(1, 2) @ self.context_values  # (h, A * W, d)
        return found.unflatten(1, (shape[0], shape[2])).transpose(0, 1) + weights[..., num_pairs:] @ self.values
