"""The KV cache of a draft module, the drafters that have one, and their drafts in CUDA graphs."""

import sys
from abc import abstractmethod
from array import array
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafters.nn import graph
from drafters.nn.anchor_attention import BLOCK
from drafters.nn.table import Table
from drafters.protocol import UNLIMITED, BaseWeights, LearnedDrafter, Limits, StepResult
from drafters.tree import DraftTree

Context = list[tuple[Tensor, ...]]
"""For each layer the keys and values (B, h, S, d) of S positions, or whatever else a drafter keeps of them."""
SLACK = 64  # positions kept beyond a window, so that it is still full after the rewinds of a few rejected drafts
NUM_ROWS, NUM_ENDS = 32, 8  # new positions and end-of-sequence tokens that a CUDA graph takes, more than usual


class DraftCache:
    """Keys and values per draft layer of committed positions, never of those of a draft.

    The buffers double when full, so that appending copies only what is new. With a window, only that many last
    positions are read and few more kept, in buffers of at most twice ``window + SLACK`` positions. After a rewind
    behind the first position that is kept, the window fills up again.

    A cache that is given its buffers holds all positions, and stays at their addresses.
    """

    def __init__(self, window: int = 0, buffers: Context | None = None) -> None:
        self.window, self._fixed = window, buffers  # 0 reads all positions
        self._kept = 0 if buffers else window  # 0 keeps all positions
        self.clear()

    def clear(self) -> None:
        """Forget all positions, before a new text."""
        self.length = self.num_held = 0  # committed positions of the text, and how many of them are kept, the last ones
        self._buffers: Context = self._fixed or []
        self._observed: list[Tensor] = []
        self.text = array("q")  # the tokens, as far as a drafter has put them here

    def observe(self, hidden: Tensor) -> None:
        """Keep the base's hidden states (n, F * D) of new positions until a draft needs their keys and values."""
        self._observed.append(hidden)

    def take_observed(self) -> Tensor | None:
        """The states (n, F * D) of the positions from ``length`` on that were observed since the last call, or None.

        Those that no window will contain are left out, and ``length`` advances over them.
        """
        if not self._observed:
            return None
        hidden = self._observed[0] if len(self._observed) == 1 else torch.cat(self._observed)
        self._observed = []
        num_skipped = max(0, len(hidden) - self._kept - SLACK) if self._kept else 0
        if num_skipped:
            self.length += num_skipped
            self.num_held = 0
        return hidden[num_skipped:] if len(hidden) else None

    def rewind(self, length: int) -> None:
        """Forget what was observed from position ``length - 1`` on, where a root is again."""
        num_dropped = max(0, self.length - (length - 1))
        self.length -= num_dropped
        self.num_held = max(0, self.num_held - num_dropped)
        del self.text[length:]
        if self._observed:
            self._observed = [torch.cat(self._observed)[: max(0, length - 1 - self.length)]]

    def append(self, context: Context) -> None:
        """Add the keys and values (1, h, S, d) of new positions, for each layer."""
        num_new, num_kept = context[0][0].shape[-2], self.num_held
        if self._kept and num_kept + num_new > 2 * (self._kept + SLACK):
            num_kept = max(0, self._kept + SLACK - num_new)
        num_held = num_kept + num_new
        if num_kept < self.num_held or not self._buffers or self._buffers[0][0].shape[-2] < num_held:
            self._move(context, num_kept, num_held)
        for buffers, states in zip(self._buffers, context, strict=True):
            for buffer, new in zip(buffers, states, strict=True):
                buffer[..., num_kept:num_held, :] = new
        self.advance(num_new)
        self.num_held = num_held

    def advance(self, num_new: int) -> None:
        """Count positions as cached whose keys and values are in the buffers."""
        self.length += num_new
        self.num_held += num_new

    def _move(self, context: Context, num_kept: int, num_held: int) -> None:
        """Move the last positions to the front of new buffers, with room for more of them."""
        size = max(256, 2 * num_held)
        if self._kept:
            size = max(num_held, min(size, 2 * (self._kept + SLACK)))
        full = self._buffers
        self._buffers = resized(context, size)
        for old, new in zip(chain(*full), chain(*self._buffers), strict=False):
            new[..., :num_kept, :] = old[..., self.num_held - num_kept : self.num_held, :]

    @property
    def is_in_place(self) -> bool:
        """Whether all positions are in the buffers that the cache was given."""
        return self._buffers is self._fixed

    @property
    def first(self) -> int:
        """The first of the positions in the buffers that a draft may attend to."""
        return max(0, self.num_held - self.window) if self.window else 0

    def read(self) -> Context:
        """Views of the keys and values (1, h, n, d) in the window, for each layer."""
        return [tuple(buffer[..., self.first : self.num_held, :] for buffer in buffers) for buffers in self._buffers]


def resized(context: Context, size: int) -> Context:
    """Zeros for the keys and values of so many positions."""
    return [tuple(x.new_zeros(*x.shape[:-2], size, x.shape[-1]) for x in states) for states in context]


class Root(NamedTuple):
    """Where a draft begins, on the device."""

    position: Tensor  # (1, 1) number of the positions before it
    token: Tensor  # (1, 1)
    found: Tensor | None  # what `CachingDrafter.found_in` returned
    eos: Collection[int] | Tensor  # end-of-sequence tokens
    max_depth: int = UNLIMITED.max_depth
    # (1, 1) the first position that the draft may attend to, if the context has as many as the cache of a CUDA graph.
    # The last one is before the root.
    first: Tensor | None = None

    def last(self, states: Tensor) -> Tensor:
        """The state (1, 1, 1, d) before the root, of a context's (1, 1, S, d)."""
        return states[..., -1:, :] if self.first is None else states.index_select(-2, self.position[0] - 1)


class CachingDrafter(LearnedDrafter):
    """A drafter whose draft module reads keys and values of the positions before the root, which it keeps in a cache.

    A subclass defines what is kept of a position, `cached`; how a draft is made of it, on the device by `drafted` and
    on the host by `trees_from`; and for texts that are known already, `known_text`. A CUDA graph holds the first two,
    which take from the host nothing but what the text has at its end, and compute what any limits could ask for.
    """

    anchors_at_once: int  # drafted together on a known text
    reads_tokens = False  # whether `cached` reads tokens
    num_found = 0  # numbers that `found_in` returns
    num_passes = 1  # of the draft module in a CUDA graph
    num_slots = 0  # positions behind the text in which a draft in a CUDA graph keeps keys and values of its own
    _graph: Callable[[], Table] | None = None
    _num_positions = 0  # of a text in a CUDA graph; 0 for none
    _cannot_be_captured = False  # found out once

    def __init__(self, window: int = 0) -> None:
        super().__init__()
        self._cache = DraftCache(window)

    @abstractmethod
    def cached(self, hidden: Tensor, positions: Tensor, tokens: Tensor | None, base_weights: BaseWeights) -> Context:
        """What the cache keeps of new positions (1, n), from the base's hidden states (1, n, F * D) there.

        ``tokens`` (1, n + 1) are those at these positions and the next one; None unless the drafter ``reads_tokens``.
        """

    @abstractmethod
    def drafted(self, context: Context, root: Root, base_weights: BaseWeights) -> Table:
        """What the draft module computes below a root, before which at least one position is cached."""

    @abstractmethod
    def trees_from(self, parts: list[np.ndarray], limits: Limits) -> list[DraftTree]:
        """The draft trees of A roots, from a table on the host."""

    @abstractmethod
    def known_text(
        self, hidden: Tensor, input_ids: Tensor, base_weights: BaseWeights, limits: Limits
    ) -> Callable[[Tensor], Table]:
        """Read a text as for `draft_at`, and return what computes the table of some anchors (A,), none of them 0."""

    def found_in(self, text: Sequence[int]) -> np.ndarray:
        """What the host finds in a text for the draft: ``num_found`` integers."""
        return np.empty(0, np.int64)

    # ---- decoding

    def begin(self, prompt: Sequence[int]) -> None:
        if self._num_positions and self._graph is None:
            self._capture()
        self._cache.clear()

    @torch.inference_mode()
    def observe(self, step: StepResult) -> None:
        self._cache.observe(step.committed_hidden(is_copied=self._num_positions > 0))

    def rewind(self, length: int) -> None:
        self._cache.rewind(length)

    @torch.inference_mode()
    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        assert self.base_weights is not None, "attach_base_weights() comes before propose()"
        if min(limits.max_depth, limits.max_nodes) < 1:
            return DraftTree()
        cache, hidden = self._cache, self._cache.take_observed()
        start, num_new = cache.length, 0 if hidden is None else len(hidden)
        # After a rewind there may be decided tokens whose states the base has not returned yet.
        is_observed = len(seq) == start + num_new + 1 <= self._num_positions + 1
        in_graph = self._graph is not None and cache.is_in_place and is_observed and len(limits.eos) <= NUM_ENDS
        if hidden is not None and not (in_graph and num_new <= NUM_ROWS):
            positions = torch.arange(start, start + num_new, device=hidden.device)[None]
            text = seq[start : start + num_new + 1]
            tokens = torch.tensor([text], device=hidden.device) if self.reads_tokens else None
            cache.append(self.cached(hidden[None], positions, tokens, self.base_weights))
            hidden = None
        if not cache.num_held and hidden is None:
            return DraftTree()
        return self._replay(hidden, seq, limits) if in_graph else self.draft(seq, self.base_weights, limits)

    def draft(self, seq: Sequence[int], base_weights: BaseWeights, limits: Limits) -> DraftTree:
        """The draft tree below the last token of a text, of which at least one position is cached."""
        self.draft_forwards += 1
        context = self._cache.read()
        table = self.drafted(context, self.root(context, seq, limits), base_weights)
        return self.trees_from(table.on_host(), limits)[0]

    def root(self, context: Context, seq: Sequence[int], limits: Limits) -> Root:
        """The root of a text whose context has been read."""
        # Filled on the device: copying a number there would wait for all kernels that are queued.
        device = context[0][0].device
        position, token = (torch.full((1, 1), number, device=device) for number in (self._cache.length, seq[-1]))
        found = torch.from_numpy(self.found_in(seq)).to(device) if self.num_found else None
        return Root(position, token, found, limits.eos, limits.max_depth)

    # ---- decoding in a CUDA graph

    def draft_in_graph(self, num_positions: int) -> None:
        if num_positions != self._num_positions or self._graph is None:
            self._num_positions = num_positions
            self._capture()

    def attach_base_weights(self, base_weights: BaseWeights) -> None:
        super().attach_base_weights(base_weights)
        self._graph = None  # it reads the weights where they were; the next text begins with a new one

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        self._graph = None
        return super()._apply(*arguments, **options)

    @torch.inference_mode()
    def _capture(self) -> None:
        if self.samples_drafts or self._cannot_be_captured:
            return
        weights = self.base_weights
        assert weights is not None, "attach_base_weights() comes before draft_in_graph()"
        width, device = weights.embedding.shape[1] * len(self.required_outputs.hidden_layers), weights.embedding.device
        rows = self._rows = weights.embedding.new_zeros(1, NUM_ROWS, width)  # hidden states of new positions
        # What the host says: where the text ends, its new tokens, what is found in it, and the end-of-sequence tokens.
        sizes = 4, NUM_ROWS + 1, self.num_found, NUM_ENDS
        inputs = graph.HostBuffer(sum(sizes), device=device)
        self._host, self._numbers = inputs, np.split(inputs.numbers, np.cumsum(sizes)[:-1])
        ends, tokens, found, eos = inputs.device.split(sizes)
        start, position, first, token = ends[:, None, None]

        def new() -> tuple[Tensor, Context]:
            positions = start + torch.arange(NUM_ROWS, device=device)
            return positions[0], self.cached(rows, positions, tokens[None], weights)

        size = -(-(self._num_positions + max(NUM_ROWS, self.num_slots)) // BLOCK) * BLOCK
        buffers = resized(new()[1], size)
        self._cache = DraftCache(self._cache.window, buffers)

        def draft() -> Table:
            positions, context = new()
            for buffer, states in zip(chain(*buffers), chain(*context), strict=True):
                buffer.index_copy_(-2, positions, states)
            return self.drafted(buffers, Root(position, token, found, eos, first=first), weights)

        self._numbers[0][1] = 1  # at least one position is cached
        inputs.send()
        try:
            self._graph = graph.captured(draft, device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # of torch's compilers, too
            self._cannot_be_captured = True
            reason = " ".join(str(error).split())[:200]
            print(f"the draft of {type(self).__name__} is no CUDA graph, which takes longer: {reason}", file=sys.stderr)

    def _replay(self, hidden: Tensor | None, seq: Sequence[int], limits: Limits) -> DraftTree:
        """Draft in the graph, which also takes over the hidden states (n, F * D) of new positions."""
        cache, drafted, start = self._cache, self._graph, self._cache.length
        assert drafted is not None
        if hidden is not None:
            self._rows[0, : len(hidden)] = hidden
            cache.advance(len(hidden))
        ends, tokens, found, eos = self._numbers
        ends[:] = start, cache.length, cache.first, seq[-1]
        tokens[: len(seq) - start] = seq[start:]
        eos[:] = [*limits.eos, *[-1] * (NUM_ENDS - len(limits.eos))]
        found[:] = self.found_in(seq)
        self._host.send()
        self.draft_forwards += self.num_passes
        return self.trees_from(drafted().on_host(), limits)[0]

    # ---- on a known text

    @torch.inference_mode()
    def draft_at(
        self, hidden: Tensor, input_ids: Tensor, anchors: Tensor, base_weights: BaseWeights, limits: Limits = UNLIMITED
    ) -> list[DraftTree]:
        after_first = anchors[anchors > 0]  # before the first token nothing is observed
        if min(limits.max_depth, limits.max_nodes) < 1 or not len(after_first):
            return [DraftTree()] * len(anchors)
        drafted = self.known_text(hidden, input_ids, base_weights, limits)
        tables = (drafted(part).on_host() for part in after_first.split(self.anchors_at_once))
        trees = iter([tree for table in tables for tree in self.trees_from(table, limits)])
        return [next(trees) if anchor > 0 else DraftTree() for anchor in anchors.tolist()]
