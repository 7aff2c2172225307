"""The KV cache of a draft module, which holds committed positions only, never those of a draft; and its drafter."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from drafters.protocol import UNLIMITED, BaseWeights, LearnedDrafter, Limits, StepResult
from drafters.tree import DraftTree

Context = list[tuple[Tensor, ...]]
"""For each layer the keys and values (B, h, S, d) of S positions, or whatever else a drafter keeps of them."""
SLACK = 64  # positions kept beyond a window, so that it is still full after the rewinds of a few rejected drafts


class DraftCache:
    """Keys and values per draft layer, in buffers that double when full, so that appending copies only what is new.

    With a window, only that many last positions are read and few more kept, in buffers of at most twice
    ``window + SLACK`` positions. After a rewind behind the first position that is kept, the window fills up again.
    """

    def __init__(self, window: int = 0) -> None:
        self.window = window  # 0 reads all positions
        self.clear()

    def clear(self) -> None:
        """Forget all positions, before a new text."""
        self.length = self.num_held = 0  # committed positions of the text, and how many of them are kept, the last ones
        self._buffers: list[list[Tensor]] = []
        self._observed: list[Tensor] = []

    def observe(self, hidden: Tensor) -> None:
        """Keep the base's hidden states (n, F * D) of new positions until a draft needs their keys and values."""
        self._observed.append(hidden)

    def take_observed(self) -> Tensor | None:
        """The states (n, F * D) of the positions from ``length`` on that were observed since the last call, or None.

        Those that no window will contain are left out, and ``length`` advances over them.
        """
        if not self._observed:
            return None
        hidden, self._observed = torch.cat(self._observed), []
        num_skipped = max(0, len(hidden) - self.window - SLACK) if self.window else 0
        if num_skipped:
            self.length += num_skipped
            self.num_held = 0
        return hidden[num_skipped:] if len(hidden) else None

    def rewind(self, length: int) -> None:
        """Forget what was observed from position ``length - 1`` on, where a root is again."""
        num_dropped = max(0, self.length - (length - 1))
        self.length -= num_dropped
        self.num_held = max(0, self.num_held - num_dropped)
        if self._observed:
            self._observed = [torch.cat(self._observed)[: max(0, length - 1 - self.length)]]

    def append(self, context: Context) -> None:
        """Add the keys and values (1, h, S, d) of new positions, for each layer."""
        num_new, num_kept = context[0][0].shape[-2], self.num_held
        if self.window and num_kept + num_new > 2 * (self.window + SLACK):
            num_kept = max(0, self.window + SLACK - num_new)
        num_held = num_kept + num_new
        if num_kept < self.num_held or not self._buffers or self._buffers[0][0].shape[-2] < num_held:
            self._move(context, num_kept, num_held)
        for buffers, states in zip(self._buffers, context, strict=True):
            for buffer, new in zip(buffers, states, strict=True):
                buffer[..., num_kept:num_held, :] = new
        self.num_held = num_held
        self.length += num_new

    def _move(self, context: Context, num_kept: int, num_held: int) -> None:
        """Move the last positions to the front of new buffers, with room for more of them."""
        size = max(256, 2 * num_held)
        if self.window:
            size = max(num_held, min(size, 2 * (self.window + SLACK)))
        full = self._buffers
        self._buffers = [[x.new_empty(*x.shape[:-2], size, x.shape[-1]) for x in states] for states in context]
        for old, new in zip(chain(*full), chain(*self._buffers), strict=False):
            new[..., :num_kept, :] = old[..., self.num_held - num_kept : self.num_held, :]

    def read(self) -> Context:
        """Views of the keys and values (1, h, n, d) in the window, for each layer."""
        last = slice(max(0, self.num_held - self.window) if self.window else 0, self.num_held)
        return [tuple(buffer[..., last, :] for buffer in buffers) for buffers in self._buffers]


class CachingDrafter(LearnedDrafter):
    """A drafter whose draft module reads keys and values of the positions before the root, which it keeps in a cache.

    A subclass defines what is kept of a position, `cached`, and how a draft is made of it, `draft`; and for texts that
    are known already, `known_text`.
    """

    anchors_at_once: int  # drafted together on a known text

    def __init__(self, window: int = 0) -> None:
        super().__init__()
        self._cache = DraftCache(window)

    @abstractmethod
    def cached(self, hidden: Tensor, positions: Tensor, text: Sequence[int], base_weights: BaseWeights) -> Context:
        """What the cache keeps of new positions (1, n), from the base's hidden states (1, n, F * D) there.

        ``text`` are the tokens from the first of these positions to the root.
        """

    @abstractmethod
    def draft(self, seq: Sequence[int], base_weights: BaseWeights, limits: Limits) -> DraftTree:
        """The draft tree below the last token of a text, of which at least one position is cached."""

    @abstractmethod
    def known_text(
        self, hidden: Tensor, input_ids: Tensor, base_weights: BaseWeights, limits: Limits
    ) -> Callable[[Tensor], list[DraftTree]]:
        """Read a text as for `draft_at`, and return what drafts the trees at some anchors (A,), none of them 0."""

    def begin(self, prompt: Sequence[int]) -> None:
        self._cache.clear()

    @torch.inference_mode()
    def observe(self, step: StepResult) -> None:
        self._cache.observe(step.committed_hidden())

    def rewind(self, length: int) -> None:
        self._cache.rewind(length)

    @torch.inference_mode()
    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        assert self.base_weights is not None, "attach_base_weights() comes before propose()"
        if min(limits.max_depth, limits.max_nodes) < 1:
            return DraftTree()
        if (hidden := self._cache.take_observed()) is not None:
            start = self._cache.length
            positions = torch.arange(start, start + len(hidden), device=hidden.device)[None]
            self._cache.append(self.cached(hidden[None], positions, seq[start:], self.base_weights))
        return self.draft(seq, self.base_weights, limits) if self._cache.num_held else DraftTree()

    @torch.inference_mode()
    def draft_at(
        self, hidden: Tensor, input_ids: Tensor, anchors: Tensor, base_weights: BaseWeights, limits: Limits = UNLIMITED
    ) -> list[DraftTree]:
        after_first = anchors[anchors > 0]  # before the first token nothing is observed
        if min(limits.max_depth, limits.max_nodes) < 1 or not len(after_first):
            return [DraftTree()] * len(anchors)
        draft = self.known_text(hidden, input_ids, base_weights, limits)
        trees = iter([tree for part in after_first.split(self.anchors_at_once) for tree in draft(part)])
        return [next(trees) if anchor > 0 else DraftTree() for anchor in anchors.tolist()]
