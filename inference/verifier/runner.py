"""One base and its KV cache: a forward over pending tokens and draft tree, then commit what was accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationMixin

from drafters.protocol import RequiredOutputs
from drafters.tree import DraftTree
from inference.budget import BudgetController
from inference.verifier.base import Base
from inference.verifier.cache import CacheKind, make_cache
from inference.verifier.examination import check_config, examine_once, model_state, unwrap
from inference.verifier.layers import attention_spans, compute_hidden_states, longrope_border, run_base

MAX_PENDING_OF_KEPT_MASKS = 8  # steps feed few pending tokens, a prefill feeds many and its mask is needed once


@dataclass(frozen=True)
class ForwardOutput:
    """What one base forward returns.

    Args:
        logits: (1 + M, V); row 0 belongs to the root, row 1 + i to node i.
        hidden: (P + M, F * D) hidden states of the required layers at every fed position, or None if the drafter
            requires none.
    """

    logits: Tensor
    hidden: Tensor | None


class TreeRunner(Protocol):
    """What a `Session` needs of a runner; see `Runner`. Recorded answers can take the place of the base behind it."""

    cached: int
    context_length: int
    vocab_size: int

    @property
    def base(self) -> Any:
        """A `Base`, or what takes its place; at least a `BaseInfo`."""
        ...

    def reset(self, reserve: int = 0) -> None: ...

    def forward(self, pending: Sequence[int], tree: DraftTree, required_outputs: RequiredOutputs) -> ForwardOutput: ...

    def commit(self, path: Sequence[int]) -> None: ...

    def truncate(self, length: int) -> None: ...

    def prepare(self, length: int) -> int: ...


class Runner:
    """Runs the base over one sequence, whose first ``cached`` tokens have their keys and values in the KV cache.

    In each decoding step `prepare` says how far drafts may reach, `forward` feeds the pending tokens and the draft
    tree, then `commit` keeps the pending tokens and the accepted path. Between steps, `truncate` cuts the sequence. A
    drafter that runs on this very base calls `forward_uncommitted`, then `rollback`.

    Args:
        base: A causal language model whose layers attend to the text, to all of it or to a window of it.
        cache: ``static``, one preallocated buffer, or ``dynamic``, transformers' own cache.

    Raises:
        ValueError: The logits of a draft tree would not be the base's own; see `examine`, which runs when the first
            runner of a model is made and whenever the model has changed since (`model_state`).
    """

    def __init__(self, base: Base, cache: CacheKind = "static") -> None:
        check_config(base)
        config = base.model.config
        self.base, self._causal_lm = base, unwrap(base.model)
        self.model: nn.Module = self._causal_lm.base_model
        self.head = self._causal_lm.get_output_embeddings()
        self.device, self.dtype = base.model.device, base.model.dtype
        self.context_length, self.vocab_size = base.context_length, config.vocab_size
        self._spans = attention_spans(config)
        # sdpa reads a missing mask as causal attention, eager as no mask at all.
        self._is_causal_without_mask = config._attn_implementation != "eager"
        self._longrope_border = longrope_border(config)
        self._cache = make_cache(cache, config)
        self.budgets: dict[tuple[str, str], BudgetController | None] = {}  # by spec and default
        self.reset()
        self.state = model_state(base.model)
        if base.check:
            examine_once(base.model, (self.state, cache), lambda: Runner(replace(base, check=False), cache))

    def reset(self, reserve: int = 0) -> None:
        """Empty the cache for another sequence, for which it should have room for ``reserve`` positions."""
        self.cached = 0
        self._num_pending = 0
        self._num_short = 0  # cached positions that were computed with the short factors of longrope scaling
        self._cache.clear()
        self._cache.reserve(reserve)

    def prepare(self, length: int) -> int:
        """Prepare the step that follows a text, and return where the positions of its draft tree must end.

        They end with the context. A base with longrope scaling changes the angles of all positions of a forward that
        reaches the border of the scaling, so a draft tree must not reach it before the root does. Once the root does,
        the cache is dropped where transformers' `generate` would have computed it with the other factors.

        Args:
            length: Number of tokens of the text.
        """
        if self._longrope_border is None:
            return self.context_length
        if length <= self._longrope_border:
            is_stale = self.cached > self._num_short
        else:
            # Phi-3's `generate` computes the whole text again at the border, others only what they have not cached.
            recomputes = type(self._causal_lm).prepare_inputs_for_generation is not (
                GenerationMixin.prepare_inputs_for_generation
            )
            is_stale = self._num_short > 0 and (recomputes or length - self.cached > 1)
        if is_stale:
            self.truncate(0)
        return self.context_length if length > self._longrope_border else self._longrope_border

    @torch.inference_mode()
    def forward(self, pending: Sequence[int], tree: DraftTree, required_outputs: RequiredOutputs) -> ForwardOutput:
        """Run the base once over the pending tokens and the draft tree.

        More pending tokens than the base's ``prefill_chunk`` are read, and committed, in several forwards, of which the
        last one reads the root and the tree.

        Args:
            pending: Decided tokens that are not cached yet, P of them; the last is the root.
            tree: M nodes below the root.
            required_outputs: What the drafter requires of the base.
        """
        layers, earlier = required_outputs.hidden_layers, []
        for chunk in self._leading_chunks(pending):
            earlier.append(self._forward(chunk, DraftTree(), layers).hidden)
            self.commit([])
        output = self._forward(pending[len(earlier) * self.base.prefill_chunk :], tree, layers)
        states = [hidden for hidden in (*earlier, output.hidden) if hidden is not None]
        return replace(output, hidden=torch.cat(states)) if earlier and states else output

    def _leading_chunks(self, pending: Sequence[int]) -> list[Sequence[int]]:
        """The parts of the pending tokens that are read before the last one; empty if they are read at once."""
        size = self.base.prefill_chunk or len(pending)
        if self._longrope_border is not None and self.cached + len(pending) > self._longrope_border:
            return []  # the angles of all these positions depend on where their forward ends
        return [pending[start : start + size] for start in range(0, len(pending) - size, size)]

    def _forward(self, pending: Sequence[int], tree: DraftTree, layers: Sequence[int]) -> ForwardOutput:
        self._num_pending = len(pending)
        ids, positions, masks = self._inputs(pending, tree, self.cached)
        logits, states = run_base(self._causal_lm, ids, positions, masks, self._cache, 1 + len(tree), layers)
        hidden = torch.cat([states[layer][0] for layer in layers], dim=-1) if layers else None  # (P + M, F * D)
        return ForwardOutput(logits, hidden)

    def _inputs(
        self, pending: Sequence[int], tree: DraftTree, start: int
    ) -> tuple[Tensor, Tensor, dict[str, Tensor | None]]:
        """Return token ids (1, P + M), positions (1, P + M) and masks of a forward behind ``start`` positions."""
        root = start + len(pending) - 1
        positions = [*range(start, root + 1), *(root + depth for depth in tree.depths)]
        fed = torch.tensor([[*pending, *tree.tokens], positions], device=self.device)  # one copy to the device
        return fed[:1], fed[1:], self._masks(len(pending), tree, start, fed[1], max(positions) + 1)

    def forward_at(self, tokens: Sequence[int], positions: Tensor, num_logits: int) -> Tensor:
        """Run the base over a text whose tokens have any rising positions (S,), and return its last logits."""
        masks = self._masks(len(tokens), DraftTree(), 0, positions, int(positions[-1]) + 1)
        fed = torch.tensor([tokens], device=self.device)
        return run_base(self._causal_lm, fed, positions[None], masks, self._cache, num_logits)[0]

    def _masks(
        self, num_pending: int, tree: DraftTree, start: int, positions: Tensor, end: int
    ) -> dict[str, Tensor | None]:
        """Build the additive attention mask (1, 1, P + M, start + P + M) for each kind of attention in the base.

        A pending token sees the cache and the pending tokens up to itself. A node sees the cache, all pending tokens,
        its ancestors and itself. Layers with a sliding window or chunks see those of them that are near enough by their
        positions; their places in the cache do not matter.

        Args:
            num_pending: Number of pending tokens P.
            tree: M nodes.
            start: Number of positions before the pending tokens.
            positions: (P + M,) positions of the fed tokens.
            end: The largest of them plus 1.

        Returns:
            A mask by kind, or None for every kind if plain causal attention is the same.
        """
        all_near = end <= min(self._spans.values())
        is_causal = num_pending == 1 or (self._is_causal_without_mask and not start)
        if not len(tree) and all_near and is_causal and self._cache.get_seq_length() == start:
            return dict.fromkeys(self._spans)
        make = _kept_mask if num_pending <= MAX_PENDING_OF_KEPT_MASKS else causal_tree_mask
        mask = make(num_pending, tuple(tree.parents), self.dtype, self.device)
        mask = nn.functional.pad(mask, (start, 0))[None, None]
        if all_near:
            return dict.fromkeys(self._spans, mask)
        key_positions = torch.cat([torch.arange(start, device=self.device), positions])
        first_visible = {
            "full_attention": torch.zeros_like(positions),
            "sliding_attention": positions - self._spans.get("sliding_attention", 0) + 1,
            "chunked_attention": positions - positions % self._spans.get("chunked_attention", 1),
        }
        lowest = torch.finfo(self.dtype).min
        return {kind: mask.masked_fill(key_positions < first_visible[kind][:, None], lowest) for kind in self._spans}

    @torch.inference_mode()
    def commit(self, path: Sequence[int]) -> None:
        """Keep the pending tokens and the accepted nodes of the last forward in the cache, and drop the others."""
        first_node = self.cached + self._num_pending  # position in the cache of node 0
        num_in_place = 0
        while num_in_place < len(path) and path[num_in_place] == num_in_place:
            num_in_place += 1
        self._cache.keep(first_node + num_in_place, [first_node + node for node in path[num_in_place:]])
        self.cached = first_node + len(path)
        if self._longrope_border is not None and first_node <= self._longrope_border:
            self._num_short = self.cached

    @torch.inference_mode()
    def forward_uncommitted(self, tokens: Sequence[int], start: int, model: nn.Module | None = None) -> Tensor:
        """Run the base over a chain of draft tokens behind the cache; `rollback` drops them.

        Args:
            tokens: Tokens that follow the cached ones and those of earlier calls since the last commit.
            start: Position of the first token.
            model: The base without its LM head, or a view of it that leaves out sublayers (a layer without attention
                then caches fewer positions than the others). By default the whole base.

        Returns:
            (1, V) logits after the last token.
        """
        model = self.model if model is None else model
        ids, positions, masks = self._inputs(tokens, DraftTree(), start)
        return self.head(compute_hidden_states(model, ids, positions, masks, self._cache)[-1][0, -1:])

    @torch.inference_mode()
    def rollback(self) -> None:
        """Drop what was fed since the last commit, in each layer as much as it cached of it."""
        self._cache.keep(self.cached, [])

    @torch.inference_mode()
    def truncate(self, length: int) -> None:
        """Keep only the first ``length`` cached tokens."""
        assert length <= self.cached, "a cache cannot be cut to more than it holds"
        if length < self.cached:
            self._cache.keep(length, [])
            self.cached, self._num_short = length, min(length, self._num_short)


def causal_tree_mask(num_pending: int, parents: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Build the additive attention mask (P + M, P + M) over the pending tokens and the draft tree.

    Args:
        num_pending: Number of pending tokens P.
        parents: Parent of each of the M nodes.
        dtype: Dtype of the mask.
        device: Device of the mask.
    """
    is_visible = np.tri(num_pending + len(parents), dtype=bool)
    is_visible[num_pending:, num_pending:] = DraftTree(parents, parents).ancestor_mask()
    mask = torch.zeros(is_visible.shape, dtype=dtype)
    mask[torch.from_numpy(~is_visible)] = torch.finfo(dtype).min
    return mask.to(device)


_kept_mask = lru_cache(maxsize=256)(causal_tree_mask)  # chains and lookahead windows look the same in every step
