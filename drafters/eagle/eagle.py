"""EAGLE, and its base class, which EAGLE-3 shares: one decoder layer applied to its own output, token by token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.checks import MAX_LAYERS, check_at_least, check_at_most, check_choices, check_hidden_layers
from drafters.losses import gathered_logits
from drafters.losses.distillation import cross_entropy_of_states
from drafters.nn.draft_cache import CachingDrafter, Context, Root
from drafters.nn.table import Table
from drafters.nn.transformer import Attention, FeedForward, RMSNorm, RotaryEmbedding
from drafters.protocol import BaseShape, BaseWeights, Limits, RequiredOutputs, TrainingBatch
from drafters.registry import register
from drafters.tree import DraftTree
from drafters.trees import dynamic


@dataclass(frozen=True)
class AutoregressiveDraftOptions:
    """How the draft layer builds a draft tree; decoding may change these options.

    Args:
        depth: Levels of a draft tree; each is one pass of the draft layer.
        width: Nodes expanded at each level.
        top_k: Children of an expanded node.
        num_nodes: M, largest number of nodes in a draft tree.
        min_probability: Nodes whose path is less probable than this are not fed to the base.
        tree: ``dynamic``, the most probable nodes found (EAGLE-2), or ``chain``, the most probable token at each level.
        window: Number of positions that the layer attends to, the node's own and those before it, in training and in
            decoding; 0 for all. The time and the cache of a draft then do not grow with the text. Must exceed
            ``depth``.
    """

    depth: int = 6
    width: int = 10
    top_k: int = 10
    num_nodes: int = 60
    min_probability: float = 0.0
    tree: Literal["dynamic", "chain"] = "dynamic"
    window: int = 0

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(1, depth=self.depth, width=self.width, top_k=self.top_k)
        check_at_most(MAX_LAYERS, depth=self.depth)
        check_at_least(0, num_nodes=self.num_nodes, window=self.window)
        if 0 < self.window <= self.depth:
            raise ValueError(f"window ({self.window}) must exceed depth ({self.depth}), or be 0 for the whole text")


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


class AutoregressiveDrafter(CachingDrafter):
    """One decoder layer over pairs of a hidden state and the token that follows it.

    Pair p joins the state of position p with token p + 1. The layer, causal over pairs, predicts the state of position
    p + 1, from which the distribution of token p + 2 is read. Up to the root the states are the base's; below it they
    are the layer's own output. A subclass defines the ``loss``, and its states by `project_hidden`, `join_embedding`
    and `logits`; they are made of the base's ``hidden_layers``.
    """

    anchors_at_once = 16
    reads_tokens = distillation = True

    def __init__(
        self, base: BaseShape, layer: DraftLayer, hidden_layers: Sequence[int], draft: AutoregressiveDraftOptions
    ) -> None:
        super().__init__(draft.window)
        check_hidden_layers(hidden_layers, base)
        self.required_outputs = RequiredOutputs(tuple(hidden_layers))
        self.draft_options = draft
        self.window = draft.window
        self.width, self.top_k = (1, 1) if draft.tree == "chain" else (draft.width, draft.top_k)
        self.layer, self.num_passes = layer, draft.depth

    # ---- defined by a subclass

    @abstractmethod
    def project_hidden(self, hidden: Tensor) -> Tensor:
        """States (..., D) from the base's hidden states (..., F * D)."""

    @abstractmethod
    def join_embedding(self, states: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream (..., D) and the attention input (..., D or 2 * D) of pairs.

        A pair is a state (..., D) and the embedding (..., D) of the token that follows it.
        """

    @abstractmethod
    def logits(self, states: Tensor, base_weights: BaseWeights) -> Tensor:
        """Logits (..., V) of states (..., D)."""

    # ---- training

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.post_attention_layernorm.weight.dtype  # linear layers may be in 8 bits

    def embed(self, tokens: Tensor, base_weights: BaseWeights) -> Tensor:
        """Embeddings (..., D) of tokens (...), in the drafter's dtype."""
        return base_weights.embedding[tokens].to(self.dtype)

    def forward(self, states: Tensor, tokens: Tensor, base_weights: BaseWeights) -> Tensor:
        """The predicted state (B, S, D) of each next position, from all states (B, S, D) and the tokens after them."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        residual, x = self.join_embedding(states, self.embed(tokens, base_weights))
        inputs = self.layer.queries_keys_values(x, positions)
        mask = unroll_mask(tokens.shape[1], 0, self.window, tokens.device) if self.window else None
        attended = F.scaled_dot_product_attention(*inputs, attn_mask=mask, is_causal=mask is None)
        return self.layer(residual, attended)

    # ---- drafting

    def cached(self, hidden: Tensor, positions: Tensor, tokens: Tensor | None, base_weights: BaseWeights) -> Context:
        """Keys and values of the pairs at positions (1, n), and the layer's inputs for them, two of (1, 1, n, ·).

        The inputs are cached too, because after a rewind the last remaining pair is the one before a root again.
        """
        assert tokens is not None, "pairs have tokens"
        states = self.project_hidden(hidden.to(self.dtype))
        residual, x = self.join_embedding(states, self.embed(tokens[:, 1:], base_weights))
        keys_values = self.layer.self_attn.keys_values(x, self.layer.rotary(positions))
        return [keys_values, (residual[:, None], x[:, None])]

    def _start(self, context: Context, root: Root, base_weights: BaseWeights) -> tuple[Paths, Tensor]:
        """The paths below a root, and the logits (1, V) there."""
        keys_values, (residuals, inputs) = context
        visible: Tensor | None = None
        if root.first is not None:
            places = torch.arange(residuals.shape[-2], device=residuals.device)
            visible = (places >= root.first) & (places < root.position)
        paths = Paths(self, base_weights, keys_values, root.position[0], visible)
        return paths, paths.start(root.last(residuals)[:, 0], root.last(inputs)[:, 0])

    def drafted(self, context: Context, root: Root, base_weights: BaseWeights) -> Table:
        paths, logits = self._start(context, root, base_weights)
        return self._grow(logits, paths, root)

    def _grow(self, logits: Tensor, paths: Paths, within: Root | Limits) -> Table:
        depth = min(self.draft_options.depth, within.max_depth)
        return dynamic.grow(logits, paths.feed, self.width, self.top_k, depth, within.eos)

    def trees_from(self, parts: list[np.ndarray], limits: Limits) -> list[DraftTree]:
        return dynamic.best_nodes(parts, limits, self.draft_options.num_nodes, self.draft_options.min_probability)

    def draft(self, seq: Sequence[int], base_weights: BaseWeights, limits: Limits) -> DraftTree:
        context = self._cache.read()
        paths, logits = self._start(context, self.root(context, seq, limits), base_weights)
        # After a rewind there are decided tokens whose states the base has not returned yet.
        for token in seq[self._cache.length + 1 :]:
            logits = paths.feed(torch.full((1, 1), token, device=logits.device), paths.only_slot)[:, 0]
        table = self._grow(logits, paths, limits)
        self.draft_forwards += paths.num_passes
        return self.trees_from(table.on_host(), limits)[0]

    def known_text(
        self, hidden: Tensor, input_ids: Tensor, base_weights: BaseWeights, limits: Limits
    ) -> Callable[[Tensor], Table]:
        positions = torch.arange(len(hidden) - 1, device=hidden.device)
        text = hidden[None, :-1], positions[None], input_ids[None]
        context, (residuals, inputs) = self.cached(*text, base_weights)

        def draft(anchors: Tensor) -> Table:
            paths = Paths(self, base_weights, context, anchors, positions < anchors[:, None])
            logits = paths.start(residuals[0, 0, anchors - 1][:, None], inputs[0, 0, anchors - 1][:, None])
            return self._grow(logits, paths, limits)

        return draft


@dataclass(eq=False)
class Paths:
    """Beams of nodes below A roots of one text, extended level by level.

    A node attends to the pairs before its root, which all roots share, to its ancestors and to itself, or to those of
    them that are in its window. W is the size of the latest beam, N the number of nodes in all beams.
    """

    module: AutoregressiveDrafter  # its layer runs once per level
    base_weights: BaseWeights
    # Keys and values of the text's pairs, two of (1, h, S, d); those of the last pairs suffice if they fill the window
    # and there is a single root.
    context: tuple[Tensor, ...]
    anchors: Tensor  # (A,) positions of the roots
    visible: Tensor | None  # (A, S) bool, which pairs come before each root; None for all of them

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

    def feed(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """Logits (A, W, V) below the tokens (A, W) of the next beam, each below a slot (A, W) of the latest one."""
        module, width = self.module, tokens.shape[1]
        states = self.states.gather(1, slots[..., None].expand(-1, -1, self.states.shape[-1]))
        residual, x = module.join_embedding(states, module.embed(tokens, self.base_weights))
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
        return self.module.logits(self.states, self.base_weights)

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
        drafted = (queries @ self.keys.mT).masked_fill(~self.ancestor_mask[:, None], -torch.inf)  # (A, h, W, N)
        scores = torch.cat([shared, drafted], dim=-1) * shape[-1] ** -0.5
        weights = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1).to(queries.dtype)
        context = weights[..., :num_pairs].transpose(0, 1).flatten(1, 2) @ context_values  # (h, A * W, d)
        return context.unflatten(1, (shape[0], shape[2])).transpose(0, 1) + weights[..., num_pairs:] @ self.values

    def _context_in_window(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values (h, S, d) of the text's pairs, and which of them (A, S) each root's nodes may attend to.

        The query of pass n is n positions behind the last pair of the text, and its path has n pairs of its own.
        """
        keys, values, visible, window = self.context_keys, self.context_values, self.visible, self.module.window
        if not window:
            return keys, values, visible
        if visible is None:
            first = max(0, keys.shape[1] + self.num_passes - window)
            return keys[:, first:], values[:, first:], None
        first_visible = self.anchors + self.num_passes - window
        return keys, values, visible & (torch.arange(keys.shape[1], device=keys.device) >= first_visible[:, None])


def unroll_mask(num_positions: int, depth: int, window: int, device: torch.device) -> Tensor:
    """Which pairs of a depth, and of those before it, each pair of that depth may attend to.

    At depth j pair p attends to the base's pairs up to p - j, and at each depth in between to the one on its own path;
    with a window, which must exceed the depth, only to that many, its own included. Returns (S, (depth + 1) * S) bool:
    block 0 are the base's pairs, block i those of depth i.
    """
    at = torch.arange(num_positions, device=device)
    offset = at[None] - at[:, None]  # key position - query position
    base = (offset <= -depth) & (offset > -window) if window else offset <= -depth
    return torch.cat([base, *(offset == i - depth for i in range(1, depth + 1))], dim=-1)


@dataclass(frozen=True)
class EAGLELossOptions:
    """EAGLE's loss.

    Args:
        feature_weight: Weight of the smooth L1 distance between predicted and actual features.
        token_weight: Weight of the cross-entropy between the distributions of predicted and actual features.
        noise: Width of the uniform noise added to features in training, times 512 / S.
    """

    feature_weight: float = 1.0
    token_weight: float = 0.1
    noise: float = 0.2


@register("eagle")
class EAGLE(AutoregressiveDrafter):
    """EAGLE (arXiv 2401.15077) with the dynamic draft tree of EAGLE-2 (arXiv 2406.16858).

    A feature is a last hidden state of the base, which its LM head reads. The feature of position p is joined with the
    embedding of token p + 1; one LLaMA layer predicts the feature of position p + 1 from it, and the frozen LM head
    reads the distribution of token p + 2. Training uses the features of the text; below the root the layer uses its
    own.

    Args:
        fc_bias: Whether the projection of feature and embedding has a bias, as in the paper's code. vLLM's EAGLE has
            none.
    """

    def __init__(
        self,
        base: BaseShape,
        fc_bias: bool = True,
        loss: EAGLELossOptions = EAGLELossOptions(),
        draft: AutoregressiveDraftOptions = AutoregressiveDraftOptions(),
    ) -> None:
        layer = DraftLayer(base)
        super().__init__(base, layer, hidden_layers=(-1,), draft=draft)
        self.loss_options = loss
        self.fc = nn.Linear(2 * base.hidden_size, base.hidden_size, bias=fc_bias)

    def project_hidden(self, hidden: Tensor) -> Tensor:
        return hidden

    def join_embedding(self, states: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat([embedded, states], dim=-1))
        return x, x  # EAGLE's layer has no norm before attention

    def logits(self, states: Tensor, base_weights: BaseWeights) -> Tensor:
        return gathered_logits.base_logits(states, base_weights)

    def loss(self, batch: TrainingBatch, base_weights: BaseWeights) -> tuple[Tensor, dict[str, Tensor]]:
        """Section 3.2: features and distributions at every position whose next token is the assistant's."""
        options = self.loss_options
        inputs = batch.hidden[:, :-2].to(self.dtype)  # pair p predicts the feature of p + 1 and the token of p + 2
        if self.training and options.noise:
            inputs = inputs + (torch.rand_like(inputs) - 0.5) * (options.noise * 512 / batch.hidden.shape[1])
        predicted = self(inputs, batch.input_ids[:, 1:-1], base_weights)
        counts = batch.loss_mask[:, 2:]
        counted = counts.nonzero(as_tuple=True)  # found once: the host waits for their number
        predicted, features = predicted[counted], batch.hidden[:, 1:-1][counted]  # (N, D)
        num_terms = batch.divisor(counts.sum())
        distances = F.smooth_l1_loss(predicted, features.to(predicted.dtype), reduction="none").mean(-1)
        feature_loss = distances.sum() / num_terms
        token_losses = cross_entropy_of_states(
            predicted, lambda states: self.logits(states, base_weights), features, base_weights.head
        )
        token_loss = token_losses.sum() / num_terms
        loss = options.feature_weight * feature_loss + options.token_weight * token_loss
        return loss, {"feature_loss": feature_loss.detach(), "token_loss": token_loss.detach()}
