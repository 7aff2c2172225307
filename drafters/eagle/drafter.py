"""Drafters that apply one decoder layer to its own output, one token at a time (EAGLE and its relatives)."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.checks import (
    MAX_LAYERS,
    check_above_zero,
    check_at_least,
    check_at_most,
    check_choices,
    check_hidden_layers,
)
from drafters.eagle.paths import DraftLayer, Paths
from drafters.nn.draft_cache import DraftCache
from drafters.protocol import UNLIMITED, BaseShape, BaseWeights, LearnedDrafter, Limits, RequiredOutputs, StepResult
from drafters.tree import DraftTree
from drafters.trees import dynamic, static
from drafters.trees.search import SearchLimits


@dataclass(frozen=True)
class AutoregressiveDraftOptions:
    """How the draft layer builds a draft tree; decoding may change these options.

    Args:
        depth: Levels of a draft tree; each is one pass of the draft layer.
        width: Nodes expanded at each level.
        top_k: Children of an expanded node.
        num_nodes: M, largest number of nodes in a draft tree.
        min_probability: Nodes whose path is less probable than this are not fed to the base.
        tree: ``dynamic``, the most probable nodes found (EAGLE-2), ``static``, nodes of the same ranks in every draft
            (EAGLE), or ``chain``, the most probable token at each level.
        static: Paths of ranks for ``tree: static``, parents first. By default the most probable ones, if the token of
            rank r, counted from 0, is right with probability 2^-(r + 1).
        draws: Children sampled at each link of a chain, for exact rejection sampling; 0 takes the most probable token.
        temperature: Temperature of the sampled children.
        window: Number of positions that the layer attends to, the node's own and those before it, in training and in
            decoding; 0 for all. The time and the cache of a draft then do not grow with the text. Must exceed
            ``depth``.
    """

    depth: int = 6
    width: int = 10
    top_k: int = 10
    num_nodes: int = 60
    min_probability: float = 0.0
    tree: Literal["dynamic", "static", "chain"] = "dynamic"
    static: Sequence[Sequence[int]] = ()
    draws: int = 0
    temperature: float = 1.0
    window: int = 0

    def __post_init__(self) -> None:
        check_choices(self)
        if self.draws and self.tree != "chain":
            raise ValueError(f"draws ({self.draws}) needs tree: chain; other trees take the most probable tokens")
        if self.static and self.tree == "dynamic":
            raise ValueError("static holds the ranks of tree: static, but tree is dynamic: leave out one of them")
        check_at_least(1, depth=self.depth, width=self.width, top_k=self.top_k)
        check_at_most(MAX_LAYERS, depth=self.depth)
        check_at_least(0, num_nodes=self.num_nodes, draws=self.draws, window=self.window)
        if 0 < self.window <= self.depth:
            raise ValueError(f"window ({self.window}) must exceed depth ({self.depth}), or be 0 for the whole text")
        check_above_zero(temperature=self.temperature)


class AutoregressiveDrafter(LearnedDrafter):
    """One decoder layer over pairs of a hidden state and the token that follows it.

    Pair p joins the state of position p with token p + 1. The layer, causal over pairs, predicts the state of position
    p + 1, from which the distribution of token p + 2 is read. Up to the root the states are the base's; below it they
    are the layer's own output. A subclass defines the ``loss``, and its states by `enter`, `pair` and `read`; they are
    made of the base's ``hidden_layers``.
    """

    chunk_anchors = 16  # anchors drafted at once on a known text

    def __init__(
        self, base: BaseShape, layer: DraftLayer, hidden_layers: Sequence[int], draft: AutoregressiveDraftOptions
    ) -> None:
        super().__init__()
        check_hidden_layers(hidden_layers, base)
        self.required_outputs = RequiredOutputs(tuple(hidden_layers))
        self.draft_options = draft
        self.samples_drafts, self.window = draft.draws > 0, draft.window
        self.width, self.top_k = (1, 1) if draft.tree == "chain" else (draft.width, draft.top_k)
        halving = np.full((draft.depth, min(draft.top_k, base.vocab_size)), 0.5).cumprod(1)
        ranks = draft.static or static.static_tree(halving, draft.num_nodes)
        self.static = static.checked(ranks, draft.depth, base.vocab_size) if draft.tree == "static" else []
        self.layer = layer
        self._cache = DraftCache(2, draft.window)

    # ---- defined by a subclass

    @abstractmethod
    def enter(self, hidden: Tensor) -> Tensor:
        """States (..., D) from the base's hidden states (..., F * D)."""

    @abstractmethod
    def pair(self, states: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream (..., D) and the attention input (..., D or 2 * D) of pairs.

        A pair is a state (..., D) and the embedding (..., D) of the token that follows it.
        """

    @abstractmethod
    def read(self, states: Tensor, base_weights: BaseWeights) -> Tensor:
        """Logits (..., V) of states (..., D)."""

    # ---- training

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.self_attn.o_proj.weight.dtype

    def embed(self, tokens: Tensor, base_weights: BaseWeights) -> Tensor:
        """Embeddings (..., D) of tokens (...), in the drafter's dtype."""
        return base_weights.embedding[tokens].to(self.dtype)

    def forward(self, states: Tensor, tokens: Tensor, base_weights: BaseWeights) -> Tensor:
        """The predicted state (B, S, D) of each next position, from all states (B, S, D) and the tokens after them."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        residual, x = self.pair(states, self.embed(tokens, base_weights))
        inputs = self.layer.queries_keys_values(x, positions)
        mask = unroll_mask(tokens.shape[1], 0, self.window, tokens.device) if self.window else None
        attended = F.scaled_dot_product_attention(*inputs, attn_mask=mask, is_causal=mask is None)
        return self.layer(residual, attended)

    # ---- drafting

    def begin(self, prompt: Sequence[int]) -> None:
        self._cache = DraftCache(2, self.window)

    @torch.inference_mode()
    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        assert self.base_weights is not None, "attach_base_weights() comes before propose()"
        if min(limits.max_depth, limits.max_nodes, self.draft_options.num_nodes) < 1:
            return DraftTree()
        self._cache_pairs(seq, self.base_weights)
        num_pairs = self._cache.length
        if self._cache.num_held == 0:
            return DraftTree()
        (keys, values), (residuals, inputs) = self._cache.read()
        anchor = torch.full((1,), num_pairs, device=keys.device)  # filled on the device: nothing is copied to it
        paths = Paths(self, self.base_weights, (keys, values), anchor, window=self.window)
        logits = paths.start(residuals[:, 0, -1:], inputs[:, 0, -1:])
        for token in seq[num_pairs + 1 :]:  # after a rewind: decided tokens whose states the base has not returned yet
            logits = paths.step(torch.full((1, 1), token, device=keys.device), paths.only_slot)[:, 0]
        generator = torch.Generator(logits.device).manual_seed(limits.draft_seed)
        tree = self._trees(logits, paths, limits, generator)[0]
        self.draft_forwards += paths.num_passes
        return tree

    def _cache_pairs(self, seq: Sequence[int], base_weights: BaseWeights) -> None:
        """Cache the pairs of observed states, now that their next tokens are known.

        The layer's inputs are cached too, because after a rewind the last remaining pair is the one before a root
        again.
        """
        cache = self._cache
        if (hidden := cache.take_observed()) is None:
            return
        states = self.enter(hidden[None].to(self.dtype))  # (1, n, D)
        start, end, device = cache.length, cache.length + states.shape[1], states.device
        tokens = torch.tensor([seq[start + 1 : end + 1]], device=device)
        residual, x = self.pair(states, self.embed(tokens, base_weights))
        rotation = self.layer.rotary(torch.arange(start, end, device=device)[None])
        cache.append([self.layer.self_attn.keys_values(x, rotation), (residual[:, None], x[:, None])])

    @torch.inference_mode()
    def observe(self, step: StepResult) -> None:
        self._cache.observe(step.committed_hidden())

    def rewind(self, length: int) -> None:
        self._cache.rewind(length)

    def _trees(self, logits: Tensor, paths: Paths, limits: Limits, generator: torch.Generator) -> list[DraftTree]:
        options, step = self.draft_options, paths.step
        depth, num_nodes = min(options.depth, limits.max_depth), min(options.num_nodes, limits.max_nodes)
        if self.static:
            return [tree.pruned(depth, num_nodes, limits.eos) for tree in static.grow(logits, step, self.static)]
        if not options.draws:
            within = SearchLimits(num_nodes, depth, limits.eos, options.min_probability)
            return dynamic.grow(logits, step, self.width, self.top_k, within)
        # The depth must not depend on what is sampled, as it would if distinct nodes were counted: that is a bias.
        depth = min(depth, num_nodes // options.draws)
        if depth < 1:
            return [DraftTree()] * len(logits)
        return dynamic.draw(logits, step, depth, options.draws, options.temperature, generator, limits.eos)

    @torch.inference_mode()
    def draft_at(
        self, hidden: Tensor, input_ids: Tensor, anchors: Tensor, base_weights: BaseWeights, limits: Limits = UNLIMITED
    ) -> list[DraftTree]:
        after_first = anchors[anchors > 0]  # before the first token nothing is observed
        if min(limits.max_depth, limits.max_nodes, self.draft_options.num_nodes) < 1 or len(after_first) == 0:
            return [DraftTree()] * len(anchors)
        states = self.enter(hidden[None, :-1].to(self.dtype))
        positions = torch.arange(states.shape[1], device=states.device)
        residual, x = self.pair(states, self.embed(input_ids[None, 1:], base_weights))
        context = self.layer.self_attn.keys_values(x, self.layer.rotary(positions[None]))
        trees: list[DraftTree] = []
        generator = torch.Generator(hidden.device).manual_seed(limits.draft_seed)
        for part in after_first.split(self.chunk_anchors):
            paths = Paths(self, base_weights, context, part, positions < part[:, None], self.window)
            logits = paths.start(residual[0, part - 1][:, None], x[0, part - 1][:, None])
            # Without their distributions, each of which is as large as the vocabulary.
            trees += [replace(tree, distributions=()) for tree in self._trees(logits, paths, limits, generator)]
        drafted = iter(trees)
        return [next(drafted) if anchor > 0 else DraftTree() for anchor in anchors.tolist()]


def unroll_mask(num_positions: int, depth: int, window: int = 0, device: torch.device | None = None) -> Tensor:
    """Which pairs of a depth, and of those before it, each pair of that depth may attend to.

    At depth j pair p attends to the base's pairs up to p - j, and at each depth in between to the one on its own path;
    with a window, which must exceed the depth, only to that many, its own included. Returns (S, (depth + 1) * S) bool:
    block 0 are the base's pairs, block i those of depth i.
    """
    at = torch.arange(num_positions, device=device)
    offset = at[None] - at[:, None]  # key position - query position
    base = (offset <= -depth) & (offset > -window) if window else offset <= -depth
    return torch.cat([base, *(offset == i - depth for i in range(1, depth + 1))], dim=-1)
