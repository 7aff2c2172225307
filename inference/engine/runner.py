"""One base and one KV cache: feed a draft tree in one forward, keep what was accepted, forget the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from drafters.protocol import RequiredOutputs
from drafters.tree import DraftTree
from inference.engine.base import Base
from inference.engine.cache import CacheKind, make_cache
from inference.engine.layers import compute_hidden_states


@dataclass(frozen=True)
class ForwardOutput:
    """What one forward shows.

    Args:
        logits: (1 + M, V); row 0 is the root, row 1 + i node i.
        hidden: (P + M, F * D) states of the layers asked for at every fed position, or None.
    """

    logits: Tensor
    hidden: Tensor | None


class Runner:
    """Feeds one sequence to a base. ``cached`` leading tokens of the sequence have their keys and values held.

    Args:
        base: A causal language model with full attention.
        cache: ``static``, one preallocated buffer, or ``dynamic``, transformers' own.

    Raises:
        ValueError: The base has sliding-window or linear layers, whose caches cannot drop rejected nodes,
            or changes its logits behind the head.
    """

    def __init__(self, base: Base, cache: CacheKind = "static") -> None:
        config = base.model.config
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"} or getattr(config, "sliding_window", None):
            raise ValueError(
                f"{base.name} has layers that are not full attention ({', '.join(sorted(kinds))}): not supported"
            )
        for rule in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
            if getattr(config, rule, None) not in (None, 1, 1.0):
                raise ValueError(f"{base.name} changes its logits behind the head ({rule}): not supported")
        self.base, self.model = base, base.model.base_model
        self.head = base.model.get_output_embeddings()
        self.device, self.dtype = base.model.device, base.model.dtype
        self.context_length, self.vocab_size = base.context_length, config.vocab_size
        self._masks_itself = base.model.config._attn_implementation != "eager"  # eager reads no mask as none at all
        self._cache = make_cache(cache, config)
        self.reset()

    def reset(self, reserve: int = 0) -> None:
        """Forget the sequence, and make room for ``reserve`` positions of the next."""
        self.cached = 0
        self._num_pending = 0
        self._cache.clear()
        self._cache.reserve(reserve)

    def _mask(self, num_pending: int, tree: DraftTree) -> Tensor | None:
        """Additive mask (1, 1, P + M, cached + P + M): pending tokens are causal, a node sees the cache, all pending
        tokens, its ancestors and itself. None where plain causal attention is the same."""
        if not len(tree) and (num_pending == 1 or (self._masks_itself and not self.cached)):
            return None
        make = _known_mask if num_pending <= 8 else causal_tree_mask
        hidden = make(num_pending, tuple(tree.parents), self.dtype, self.device)
        return nn.functional.pad(hidden, (self.cached, 0))[None, None]

    @torch.inference_mode()
    def forward(self, pending: Sequence[int], tree: DraftTree, required_outputs: RequiredOutputs) -> ForwardOutput:
        """Run the base once over [pending | tree].

        Args:
            pending: Decided tokens not yet cached; the last is the root.
            tree: Candidates below the root.
            needs: What the drafter wants to see.
        """
        num_pending = self._num_pending = len(pending)
        root = self.cached + num_pending - 1
        positions = [*range(self.cached, root + 1), *(root + depth for depth in tree.depths)]
        fed = torch.tensor([[*pending, *tree.tokens], positions], device=self.device)
        wanted = required_outputs.hidden_layers
        states = compute_hidden_states(self.model, fed[:1], fed[1:], self._mask(num_pending, tree), self._cache, wanted)
        hidden = torch.cat([states[layer][0] for layer in wanted], dim=-1) if wanted else None  # (P + M, F * D)
        return ForwardOutput(self.head(states[-1][0, num_pending - 1 :]), hidden)

    @torch.inference_mode()
    def commit(self, path: Sequence[int]) -> None:
        """Keep the pending tokens and the accepted nodes in the cache."""
        kept = base = self.cached + self._num_pending
        first = 0
        while first < len(path) and path[first] == first:  # these stand already where they belong
            first += 1
        kept += first
        self._cache.keep(kept, [base + node for node in path[first:]])
        self.cached = base + len(path)

    @torch.inference_mode()
    def forward_uncommitted(self, tokens: Sequence[int], start: int) -> Tensor:
        """Feed tokens that nobody has decided on; `rollback` forgets them.

        Sublayers may be switched off meanwhile: a layer without attention holds fewer positions than the others.

        Args:
            tokens: Seen in their order, behind the cache and behind what was fed by the calls since the last commit.
            start: Position of the first.

        Returns:
            (1, V) logits of the last.
        """
        num_fed = len(tokens)
        fed = torch.tensor([[*tokens], [*range(start, start + num_fed)]], device=self.device)
        mask = None
        if num_fed > 1 or self._cache.get_seq_length() != start:  # a mask left out would get the width of layer 0
            hidden = torch.full((num_fed, start + num_fed), torch.finfo(self.dtype).min, dtype=self.dtype)
            mask = hidden.triu(start + 1)[None, None].to(self.device)
        return self.head(compute_hidden_states(self.model, fed[:1], fed[1:], mask, self._cache)[-1][0, -1:])

    @torch.inference_mode()
    def rollback(self) -> None:
        """Forget what was fed since the last commit; in each layer, however much it holds of it."""
        self._cache.keep(self.cached, [])

    @torch.inference_mode()
    def truncate(self, length: int) -> None:
        """Keep only the first ``length`` cached tokens."""
        assert length <= self.cached, "a cache cannot be cut to more than it holds"
        if length < self.cached:
            self._cache.keep(length, [])
            self.cached = length


def causal_tree_mask(num_pending: int, parents: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """What of [pending | tree] each of them must not see, as an additive mask (P + M, P + M)."""
    ancestor_mask = np.tri(num_pending + len(parents), dtype=bool)
    ancestor_mask[num_pending:, num_pending:] = DraftTree(parents, parents).ancestor_mask()
    hidden = torch.zeros(ancestor_mask.shape, dtype=dtype)
    hidden[torch.from_numpy(~ancestor_mask)] = torch.finfo(dtype).min
    return hidden.to(device)


_known_mask = lru_cache(maxsize=256)(causal_tree_mask)  # chains and windows have the same shape at every step
