"""KV caches for compiled steps: tensors of a few lengths, each of which stays at its address."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from inference.verifier.cache import BufferCache

SHORTEST = 512  # positions of the smallest cache; each larger one is twice as long


class LengthBuckets(BufferCache):
    """A cache of 512, 1024, 2048, ... positions, the smallest that holds the text.

    The keys and values of every layer are a tensor each, at an address that stays the same as long as the cache exists:
    a text that outgrows its tensors is copied into those of the next length, and the next text begins with the shortest
    ones again. Everything else is as in `BufferCache`.

    Args:
        num_layers: Number of decoder layers.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers, SHORTEST)
        self._by_length: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def fit(self, length: int) -> None:
        """Make room for ``length`` positions, once the first forward has allocated the cache."""
        if length > self.capacity:
            self._grow(length, *self.views[0])

    def reserve(self, length: int) -> None:
        """Do nothing: steps read all positions of the cache, so it is no longer than the text needs."""

    def clear(self) -> None:
        """Drop all positions, keep the memory, and return to the smallest length."""
        super().clear()
        if self._by_length:
            self.capacity = min(self._by_length)
            self.views = self._by_length[self.capacity]

    def keep(self, length: int, moved: list[int]) -> None:
        """Keep the first ``length`` positions, move the positions ``moved`` behind them, and drop the others."""
        if moved:
            sources = torch.tensor(moved, device=self.views[0][0].device)
            for states in (each for pair in self.views for each in pair):
                states[:, :, length : length + len(moved)] = states.index_select(2, sources)
        super().keep(length + len(moved), [])

    def _grow(self, length: int, keys: Tensor, values: Tensor) -> None:
        """Go on with tensors of the next sufficient length, which are allocated at the first need."""
        old, old_capacity = self.views, self.capacity
        while self.capacity < length:
            self.capacity *= 2
        if self.capacity not in self._by_length:
            pairs = [(keys, values)] * len(self.layers)
            self._by_length[self.capacity] = [
                (self._empty(key_states), self._empty(value_states)) for key_states, value_states in pairs
            ]
        self.views = self._by_length[self.capacity]
        for pair, old_pair in zip(self.views, old, strict=False):  # there are no old ones at first
            for states, old_states in zip(pair, old_pair, strict=True):
                states[:, :, :old_capacity] = old_states

    def _empty(self, like: Tensor) -> Tensor:
        """A tensor of the current capacity, of zeros: what is masked is multiplied by 0 and must be finite."""
        empty = like.new_zeros(*like.shape[:2], self.capacity, like.shape[3])
        torch._dynamo.mark_static_address(empty, guard=False)  # as transformers does; CUDA graphs then read it in place
        return empty


class _StepLayer(DynamicLayer):
    """One layer of a `StepCache`."""

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        self.keys, self.values, self.slots, self.is_initialized = keys, values, slots, True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write keys (1, H, R, d) and values (1, H, R, e) to their slots, and return those of all C positions."""
        self.keys.index_copy_(2, self.slots, key_states)  # type: ignore[union-attr]  # transformers may set None
        self.values.index_copy_(2, self.slots, value_states)  # type: ignore[union-attr]
        return self.keys, self.values  # type: ignore[return-value]

    def get_seq_length(self) -> Tensor:  # type: ignore[override]
        """Number of positions before the step, as a tensor: one graph serves all of them."""
        return self.slots[0]


class StepCache(Cache):
    """What the layers see of a cache inside a compiled step: all C positions, of which R are written.

    Args:
        views: Keys (1, H, C, d) and values (1, H, C, e) of each layer.
        slots: (R,) the positions that a step writes.
    """

    def __init__(self, views: list[tuple[Tensor, Tensor]], slots: Tensor) -> None:
        super().__init__(layers=[_StepLayer(keys, values, slots) for keys, values in views])
