"""One base and one KV cache: feed a draft tree in one forward, keep what was accepted, forget the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafters.protocol import Needs
from drafters.tree import DraftTree
from inference.base import Base
from inference.cache import CacheKind, make_cache


@dataclass(frozen=True)
class Rows:
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
        num_fed = num_pending + len(tree)
        if not len(tree) and (num_pending == 1 or not self.cached):
            return None
        sees = np.zeros((num_fed, num_fed), dtype=bool)
        sees[:num_pending, :num_pending] = np.tri(num_pending, dtype=bool)
        sees[num_pending:, :num_pending] = True
        sees[num_pending:, num_pending:] = tree.sees()
        hidden = torch.from_numpy(~sees).to(self.device)
        mask = torch.zeros(num_fed, self.cached + num_fed, dtype=self.dtype, device=self.device)
        mask[:, self.cached :].masked_fill_(hidden, torch.finfo(self.dtype).min)
        return mask[None, None]

    @torch.inference_mode()
    def forward(self, pending: Sequence[int], tree: DraftTree, needs: Needs) -> Rows:
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
        output = self.model(
            input_ids=fed[:1],
            position_ids=fed[1:],
            attention_mask=self._mask(num_pending, tree),
            past_key_values=self._cache,
            use_cache=True,
            output_hidden_states=any(layer != -1 for layer in needs.hidden_layers),
        )
        last = output.last_hidden_state[0]  # (P + M, D)
        states = [last if layer == -1 else output.hidden_states[layer][0] for layer in needs.hidden_layers]
        hidden = torch.cat(states, dim=-1) if states else None
        return Rows(self.head(last[num_pending - 1 :]), hidden)

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
    def truncate(self, length: int) -> None:
        """Keep only the first ``length`` cached tokens."""
        assert length <= self.cached, "a cache cannot be cut to more than it holds"
        if length < self.cached:
            self._cache.keep(length, [])
            self.cached = length
