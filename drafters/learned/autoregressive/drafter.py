"""Drafters that run one decoder layer again and again on its own output, a token at a time (EAGLE and its kin)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.learned.autoregressive.paths import Paths
from drafters.learned.layers.draft_cache import DraftCache
from drafters.learned.layers.transformer import Attention, FeedForward, RMSNorm, rotary
from drafters.learned.trees import dynamic
from drafters.protocol import UNLIMITED, BaseShape, BaseWeights, LearnedDrafter, Limits, RequiredOutputs, StepResult
from drafters.tree import DraftTree

Tree = Literal["dynamic", "chain"]


class DraftLayer(nn.Module):
    """The decoder layer of a LLaMA; what it attends with may be wider than what it adds to.

    Args:
        shape: The base's numbers.
        num_inputs: Width of what queries, keys and values are made of, in hidden sizes.
    """

    def __init__(self, shape: BaseShape, num_inputs: int = 1) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.self_attn.q_norm = self.self_attn.k_norm = nn.Identity()  # LLaMA has none
        if num_inputs > 1:
            width = shape.num_heads * shape.head_dim
            for name in ("q_proj", "k_proj", "v_proj"):
                setattr(self.self_attn, name, nn.Linear(num_inputs * shape.hidden_size, width, bias=False))
        self.mlp = FeedForward(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.head_dim, self.theta = shape.head_dim, shape.rope_theta

    def turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotation of integer positions (B, S), ready to broadcast over heads: two of (B, 1, S, d)."""
        cos, sin = rotary(positions, self.head_dim, self.theta)
        return cos[:, None], sin[:, None]

    def projected(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of (B, S, num_inputs * D) at positions (B, S): three of (B, h, S, d)."""
        turn = self.turn(positions)
        return self.self_attn.queries(x, turn), *self.self_attn.keys_values(x, turn)

    def forward(self, residual: Tensor, attended: Tensor) -> Tensor:
        """What becomes of (B, S, D) after attention has found (B, h, S, d)."""
        h = residual + self.self_attn.o_proj(attended.transpose(-3, -2).flatten(-2))
        return h + self.mlp(self.post_attention_layernorm(h))


class AutoregressiveDrafter(LearnedDrafter):
    """One layer over pairs: the state of a position, and the token that follows it.

    Pair p joins the state of position p with token p + 1; the layer, causal over pairs, makes of it the state of
    position p + 1, which is read as the law of token p + 2. Up to the root the states are the base's own; below it
    they are the layer's. A subclass has a ``loss`` and says by three methods what its states are.

    Args:
        base: Numbers of the base.
        num_inputs: As in `DraftLayer`.
        hidden_layers: Base layers the states are made of.
        depth: Levels of a draft tree, each one pass of the layer.
        width: Nodes expanded at each level.
        top_k: Children of an expanded node.
        num_nodes: M, nodes of a draft tree at most.
        min_probability: Draft tokens less probable than this are not fed to the base.
        tree: ``dynamic`` (EAGLE-2) or ``chain``.
        draws: Children drawn at random at each link of a chain, with their law; 0 takes the most probable.
        temperature: Of the law they are drawn from.
        chunk_anchors: Anchors drafted for at once on known text.
    """

    decoding = frozenset({"depth", "width", "top_k", "num_nodes", "min_probability", "tree", "draws", "temperature"})

    def __init__(
        self,
        base: BaseShape,
        num_inputs: int,
        hidden_layers: Sequence[int],
        depth: int,
        width: int,
        top_k: int,
        num_nodes: int,
        min_probability: float,
        tree: Tree,
        draws: int,
        temperature: float,
        chunk_anchors: int,
    ) -> None:
        super().__init__()
        if tree not in get_args(Tree):
            raise ValueError(f"tree must be one of {', '.join(get_args(Tree))}, not {tree!r}")
        if draws and tree != "chain":
            raise ValueError(f"draws ({draws}) needs tree: chain; a dynamic tree takes the most probable tokens")
        if min(depth, width, top_k, chunk_anchors) < 1 or min(num_nodes, draws) < 0 or temperature <= 0:
            raise ValueError(
                "need depth, width, top_k and chunk_anchors of at least 1, num_nodes and draws of at least 0 and a "
                f"temperature above 0, not {depth}, {width}, {top_k}, {chunk_anchors}, {num_nodes}, {draws} and "
                f"{temperature}"
            )
        if not all(-1 <= layer <= base.num_layers for layer in hidden_layers):
            raise ValueError(
                f"hidden_layers are {[*hidden_layers]}, but the base has {base.num_layers} layers: name layers from 0, "
                f"the embedding, to {base.num_layers}, or -1, the normed last state"
            )
        self.required_outputs = RequiredOutputs(tuple(hidden_layers))
        self.depth, self.num_nodes, self.min_probability = depth, num_nodes, min_probability
        self.width, self.top_k = (1, 1) if tree == "chain" else (width, top_k)
        self.draws, self.temperature, self.chunk_anchors = draws, temperature, chunk_anchors
        self.remembers = draws > 0  # the place in a row of draws
        self.layer = DraftLayer(base, num_inputs)
        self._cache: DraftCache | None = None
        self._waiting: list[Tensor] = []  # states whose next token is not known yet
        self._generator: torch.Generator | None = None

    # ---- what a subclass says

    @abstractmethod
    def enter(self, hidden: Tensor) -> Tensor:
        """States (..., D) of the base's hidden states (..., F * D)."""

    @abstractmethod
    def pair(self, states: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """What the layer adds to, (..., D), and what it attends with, (..., num_inputs * D), of states (..., D) and
        the embeddings (..., D) of the tokens that follow them."""

    @abstractmethod
    def read(self, states: Tensor, base_weights: BaseWeights) -> Tensor:
        """Logits (..., V) of states (..., D)."""

    # ---- training

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the weights."""
        return self.layer.self_attn.o_proj.weight.dtype

    def embed(self, tokens: Tensor, base_weights: BaseWeights) -> Tensor:
        """Embeddings (..., D) of tokens (...), in the drafter's number format."""
        return base_weights.embedding[tokens].to(self.dtype)

    def forward(self, states: Tensor, tokens: Tensor, base_weights: BaseWeights) -> Tensor:
        """One pass over a text whose states are all known.

        Args:
            states: (B, S, D). tokens: (B, S), the token after each state.

        Returns:
            (B, S, D) the state of the position after each.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        residual, x = self.pair(states, self.embed(tokens, base_weights))
        return self.layer(residual, F.scaled_dot_product_attention(*self.layer.projected(x, positions), is_causal=True))

    # ---- drafting

    def begin(self, prompt: Sequence[int]) -> None:
        self._cache, self._waiting = DraftCache(2), []

    @torch.inference_mode()
    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        assert self.base_weights is not None and self._cache is not None, "borrow() and begin() come before propose()"
        if min(limits.max_depth, limits.max_nodes, self.num_nodes) < 1:
            return DraftTree()
        self._settle(seq)
        held = self._cache.length
        if held == 0:
            return DraftTree()
        (keys, values), (residuals, inputs) = self._cache.read()
        paths = Paths(self, self.base_weights, (keys, values), torch.tensor([held], device=keys.device))
        logits = paths.start(residuals[:, 0, -1:], inputs[:, 0, -1:])
        for token in seq[held + 1 :]:  # after a rewind, decided tokens whose states the base has not handed over
            logits = paths.step(torch.tensor([[token]], device=keys.device), paths.only_slot)[:, 0]
        tree = self._trees(logits, paths, limits)[0]
        self.draft_forwards += paths.num_passes
        return tree

    def _settle(self, seq: Sequence[int]) -> None:
        """Put the pairs into the cache whose states were observed, their next tokens now being known: keys and
        values, and what the layer's queries are made of, for the last one that stays may be a root's again."""
        if not self._waiting:
            return
        states, self._waiting = torch.cat(self._waiting, dim=1), []
        if states.shape[1] == 0:
            return
        start, device = self._cache.length, states.device
        tokens = torch.tensor([seq[start + 1 : start + 1 + states.shape[1]]], device=device)
        positions = torch.arange(start, start + states.shape[1], device=device)[None]
        residual, x = self.pair(states, self.embed(tokens, self.base_weights))
        keys_values = self.layer.self_attn.keys_values(x, self.layer.turn(positions))
        self._cache.append([keys_values, (residual[:, None], x[:, None])])

    @torch.inference_mode()
    def observe(self, step: StepResult) -> None:
        self._waiting.append(self.enter(step.committed_hidden()[None].to(self.dtype)))

    def rewind(self, length: int) -> None:
        if self._cache is not None:
            self._cache.truncate(length - 1)
            if self._waiting:
                self._waiting = [torch.cat(self._waiting, dim=1)[:, : max(0, length - 1 - self._cache.length)]]

    def reset(self) -> None:
        self._generator = None

    def _trees(self, logits: Tensor, paths: Paths, limits: Limits, with_distributions: bool = True) -> list[DraftTree]:
        depth, num_nodes = min(self.depth, limits.max_depth), min(self.num_nodes, limits.max_nodes)
        if self.draws:
            # The cut must not hang on what is drawn, as one by the number of distinct nodes would: that were a bias.
            depth = min(depth, num_nodes // self.draws)
            if self._generator is None or self._generator.device != logits.device:
                self._generator = torch.Generator(logits.device).manual_seed(0)
            if depth < 1:
                return [DraftTree()] * len(logits)
            return dynamic.draw(
                logits, paths.step, depth, self.draws, self.temperature, self._generator, limits.eos, with_distributions
            )
        return dynamic.grow(
            logits, paths.step, depth, self.width, self.top_k, num_nodes, limits.eos, self.min_probability
        )

    @torch.inference_mode()
    def draft_at(
        self, hidden: Tensor, input_ids: Tensor, anchors: Tensor, base_weights: BaseWeights, limits: Limits = UNLIMITED
    ) -> list[DraftTree]:
        after = anchors[anchors > 0]  # at the first token nothing has been observed
        if min(limits.max_depth, limits.max_nodes, self.num_nodes) < 1 or len(after) == 0:
            return [DraftTree()] * len(anchors)
        states = self.enter(hidden[None, :-1].to(self.dtype))
        positions = torch.arange(states.shape[1], device=states.device)
        residual, x = self.pair(states, self.embed(input_ids[None, 1:], base_weights))
        context = self.layer.self_attn.keys_values(x, self.layer.turn(positions[None]))
        trees: list[DraftTree] = []
        for part in after.split(self.chunk_anchors):
            paths = Paths(self, base_weights, context, part, visible=positions < part[:, None])
            logits = paths.start(residual[0, part - 1][:, None], x[0, part - 1][:, None])
            trees += self._trees(logits, paths, limits, with_distributions=False)
        drafted = iter(trees)
        return [next(drafted) if anchor > 0 else DraftTree() for anchor in anchors.tolist()]
