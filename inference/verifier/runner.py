"""One base and its KV cache: a forward over pending tokens and draft tree, then commit what was accepted."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from drafters.protocol import Drafter, RequiredOutputs
from drafters.tree import DraftTree
from inference.verifier.attention import TreeAttention
from inference.verifier.base import Base
from inference.verifier.bitwise import MAX_DEPTH, padded
from inference.verifier.cache import BufferCache
from inference.verifier.layers import run_base, unwrap


@dataclass(frozen=True)
class ForwardOutput:
    """What one base forward over P pending tokens and M nodes returns; row 0 of the logits belongs to the root."""

    logits: Tensor  # (1 + M, V)
    hidden: Tensor | None  # (P + M, F * D) states of the required layers; None if the drafter requires none


class Runner:
    """Runs the base over one sequence, whose first ``cached`` tokens have their keys and values in the KV cache.

    In each decoding step `prepare` says how far drafts may reach, `forward` feeds the pending tokens and the draft
    tree, then `commit` keeps the pending tokens and the accepted path. Between steps, `truncate` cuts the sequence.

    If ``row_multiple`` is not None, the rows of all its forwards are bit-identical to those of decoding token by token;
    see `inference.verifier.bitwise`. `make_runner` sets it, and checks that the logits of a draft tree are the base's.
    """

    def __init__(self, base: Base) -> None:
        self.base = base
        self.context_length, self.vocab_size = base.context_length, base.config.vocab_size
        self.attention = TreeAttention(self.causal_lm)
        self.cache = BufferCache(base.config.num_hidden_layers)
        self.row_multiple: int | None = None
        self.reset()

    @property
    def causal_lm(self) -> Any:
        """The base's model, without peft's wrapper."""
        return unwrap(self.base.model)

    def reset(self, reserve: int = 0) -> None:
        """Empty the cache for another sequence, for which it should have room for ``reserve`` positions."""
        self.cached = self._num_pending = 0
        self._num_short = 0  # cached positions that were computed with the short factors of longrope scaling
        self.cache.keep(0, [])
        self.cache.reserve(reserve)

    def prepare(self, length: int) -> int:
        """Prepare the step behind a text of this length, and return where the positions of its draft tree must end."""
        if self.attention.is_stale(length, self.cached, self._num_short):
            self.truncate(0)
        end = self.attention.end_of_positions(length)
        return end if self.row_multiple is None else min(end, length + MAX_DEPTH)

    def capture(self, drafter: Drafter) -> None:
        """Capture what steps with this drafter replay, if they are graphed; the cache must be empty."""
        return None

    def most_nodes(self, length: int) -> int:
        """The largest number of nodes that the step behind a text of this length may feed."""
        return sys.maxsize

    @torch.inference_mode()
    def forward(self, pending: Sequence[int], tree: DraftTree, required_outputs: RequiredOutputs) -> ForwardOutput:
        """Run the base once over the pending tokens and the draft tree.

        The P pending tokens are decided and not cached yet; the last is the root, and the M nodes lie below it. More
        pending tokens than the base's ``prefill_chunk`` are read, and committed, in several forwards, of which the last
        one reads the root and the tree.
        """
        layers, states = required_outputs.hidden_layers, []
        size = self.base.prefill_chunk or len(pending)
        # The angles of longrope positions depend on where their forward ends.
        may_be_split = self.attention.is_short(self.cached + len(pending))
        while may_be_split and len(pending) > size:
            hidden = self._forward(pending[:size], DraftTree(), layers).hidden
            states.append(hidden if hidden is None else hidden.clone())  # a graphed step may overwrite it
            self.commit([])
            pending = pending[size:]
        output = self._forward(pending, tree, layers)
        kept = [state for state in (*states, output.hidden) if state is not None]
        return replace(output, hidden=torch.cat(kept)) if len(kept) > 1 else output

    def _forward(self, pending: Sequence[int], tree: DraftTree, layers: Sequence[int]) -> ForwardOutput:
        self._num_pending = len(pending)
        fed = self.attention.feed(pending, tree, self.cached, self.cache, row_multiple=self.row_multiple)
        num_fed = len(pending) + len(tree)  # without the rows that fill up a multiple
        num_behind = fed.ids.shape[1] - len(pending) + 1  # rows from the root on
        num_logits = min(padded(num_behind, self.row_multiple), fed.ids.shape[1])
        logits, states = run_base(self.causal_lm, fed, num_logits, layers)
        hidden = torch.cat([states[layer][0, :num_fed] for layer in layers], dim=-1) if layers else None
        return ForwardOutput(logits[num_logits - num_behind :][: 1 + len(tree)], hidden)  # hidden (P + M, F * D)

    @torch.inference_mode()
    def commit(self, path: Sequence[int]) -> None:
        """Keep the pending tokens and the accepted nodes of the last forward in the cache, and drop the others."""
        first_node = self.cached + self._num_pending  # position in the cache of node 0
        num_in_place = next((place for place, node in enumerate(path) if node != place), len(path))
        self.cache.keep(first_node + num_in_place, [first_node + node for node in path[num_in_place:]])
        self.cached = first_node + len(path)
        if self.attention.is_short(first_node):
            self._num_short = self.cached

    @torch.inference_mode()
    def truncate(self, length: int) -> None:
        """Keep only the first ``length`` cached tokens, and drop what was fed since the last commit."""
        assert length <= self.cached, "a cache cannot be cut to more than it holds"
        self.cache.keep(length, [])
        self.cached, self._num_short = length, min(length, self._num_short)
