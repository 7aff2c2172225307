"""One base and its KV cache: a forward over pending tokens and draft tree, then commit what was accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from drafters.protocol import RequiredOutputs
from drafters.tree import DraftTree
from inference.engine.base import Base
from inference.engine.cache import CacheKind, make_cache
from inference.engine.layers import compute_hidden_states

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


class Runner:
    """Runs the base over one sequence, whose first ``cached`` tokens have their keys and values in the KV cache.

    In each decoding step `forward` feeds the pending tokens and the draft tree, then `commit` keeps the pending tokens
    and the accepted path. Between steps, `truncate` cuts the sequence. A drafter that runs on this very base calls
    `forward_uncommitted`, then `rollback`.

    Args:
        base: A causal language model with full attention.
        cache: ``static``, one preallocated buffer, or ``dynamic``, transformers' own cache.

    Raises:
        ValueError: The base has sliding-window or linear-attention layers, whose caches cannot drop rejected nodes, or
            it changes its logits after the LM head.
    """

    def __init__(self, base: Base, cache: CacheKind = "static") -> None:
        config = base.model.config
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"} or getattr(config, "sliding_window", None):
            raise ValueError(
                f"{base.name} has layers that are not full attention ({', '.join(sorted(kinds))}): not supported"
            )
        for option in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
            if getattr(config, option, None) not in (None, 1, 1.0):
                raise ValueError(f"{base.name} changes its logits after the LM head ({option}): not supported")
        self.base, self.model = base, base.model.base_model
        self.head = base.model.get_output_embeddings()
        self.device, self.dtype = base.model.device, base.model.dtype
        self.context_length, self.vocab_size = base.context_length, config.vocab_size
        # sdpa reads a missing mask as causal attention, eager as no mask at all.
        self._is_causal_without_mask = base.model.config._attn_implementation != "eager"
        self._cache = make_cache(cache, config)
        self.reset()

    def reset(self, reserve: int = 0) -> None:
        """Empty the cache for another sequence, for which it should have room for ``reserve`` positions."""
        self.cached = 0
        self._num_pending = 0
        self._cache.clear()
        self._cache.reserve(reserve)

    def _mask(self, num_pending: int, tree: DraftTree) -> Tensor | None:
        """Build the additive attention mask (1, 1, P + M, cached + P + M).

        A pending token sees the cache and the pending tokens up to itself. A node sees the cache, all pending tokens,
        its ancestors and itself.

        Returns:
            The mask, or None if plain causal attention is the same.
        """
        if not len(tree) and (num_pending == 1 or (self._is_causal_without_mask and not self.cached)):
            return None
        make = _kept_mask if num_pending <= MAX_PENDING_OF_KEPT_MASKS else causal_tree_mask
        mask = make(num_pending, tuple(tree.parents), self.dtype, self.device)
        return nn.functional.pad(mask, (self.cached, 0))[None, None]

    @torch.inference_mode()
    def forward(self, pending: Sequence[int], tree: DraftTree, required_outputs: RequiredOutputs) -> ForwardOutput:
        """Run the base once over the pending tokens and the draft tree.

        Args:
            pending: Decided tokens that are not cached yet, P of them; the last is the root.
            tree: M nodes below the root.
            required_outputs: What the drafter requires of the base.
        """
        num_pending = self._num_pending = len(pending)
        root = self.cached + num_pending - 1
        positions = [*range(self.cached, root + 1), *(root + depth for depth in tree.depths)]
        fed = torch.tensor([[*pending, *tree.tokens], positions], device=self.device)  # one copy to the device
        mask, layers = self._mask(num_pending, tree), required_outputs.hidden_layers
        states = compute_hidden_states(self.model, fed[:1], fed[1:], mask, self._cache, layers)
        hidden = torch.cat([states[layer][0] for layer in layers], dim=-1) if layers else None  # (P + M, F * D)
        return ForwardOutput(self.head(states[-1][0, num_pending - 1 :]), hidden)

    @torch.inference_mode()
    def commit(self, path: Sequence[int]) -> None:
        """Keep the pending tokens and the accepted nodes of the last forward in the cache, and drop the others."""
        first_node = self.cached + self._num_pending  # position in the cache of node 0
        num_in_place = 0
        while num_in_place < len(path) and path[num_in_place] == num_in_place:
            num_in_place += 1
        self._cache.keep(first_node + num_in_place, [first_node + node for node in path[num_in_place:]])
        self.cached = first_node + len(path)

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
        num_fed = len(tokens)
        fed = torch.tensor([[*tokens], [*range(start, start + num_fed)]], device=self.device)
        mask = None
        # Without a mask, transformers derives its width from layer 0, which may cache fewer positions than `start`.
        if num_fed > 1 or self._cache.get_seq_length() != start:
            everywhere = torch.full((num_fed, start + num_fed), torch.finfo(self.dtype).min, dtype=self.dtype)
            mask = everywhere.triu(start + 1)[None, None].to(self.device)
        model = self.model if model is None else model
        return self.head(compute_hidden_states(model, fed[:1], fed[1:], mask, self._cache)[-1][0, -1:])

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
            self.cached = length


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
