"""The base's KV cache: one contiguous buffer for all layers, or transformers' own DynamicCache."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

CacheKind = Literal["static", "dynamic"]


class _BufferLayer(DynamicLayer):
    """One layer's part of a `BufferCache`; ``keys`` and ``values`` are views of its first ``length`` positions."""

    def __init__(self, cache: BufferCache, index: int) -> None:
        self.cache, self.index, self.length, self.is_initialized = cache, index, 0, True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Add (1, H, q, d) at the end and return all there is."""
        start, self.length = self.length, self.length + key_states.shape[-2]
        keys, values = self.cache.rows(self.index, self.length, key_states)
        places = self.cache.places(start, self.length)
        keys.index_copy_(2, places, key_states)
        values.index_copy_(2, places, value_states)
        return keys.narrow(2, 0, self.length), values.narrow(2, 0, self.length)

    @property
    def keys(self) -> Tensor:
        return self.cache.buffer[0, self.index, :, :, : self.length]

    @property
    def values(self) -> Tensor:
        return self.cache.buffer[1, self.index, :, :, : self.length]

    def get_seq_length(self) -> int:
        return self.length


class BufferCache(Cache):
    """Keys and values of all layers in one buffer (2, L, 1, H, C, d), allocated ahead and written in place.

    A step copies its own rows only; accepted rows that do not yet stand where they belong are moved for all layers
    by one copy. The buffer survives `clear` and doubles where a text outgrows it.

    Args:
        num_layers: L.
        capacity: C at first.
    """

    def __init__(self, num_layers: int, capacity: int = 512) -> None:
        super().__init__(layers=[_BufferLayer(self, index) for index in range(num_layers)])
        self.capacity = capacity
        self.buffer: Tensor | None = None
        self._rows: list[tuple[Tensor, Tensor]] = []
        self._places: tuple[int, int, Tensor | None] = (0, 0, None)

    def rows(self, layer: int, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Views (1, H, C, d) of a layer's keys and values, with room for ``length`` positions."""
        if self.buffer is None or length > self.capacity:
            self.capacity = max(self.capacity, length + length // 2)
            self._grow(like)
        return self._rows[layer]

    def places(self, start: int, end: int) -> Tensor:
        """The positions from ``start`` to ``end``, made once for all layers of a forward."""
        if self._places[:2] != (start, end):
            self._places = start, end, torch.arange(start, end, device=self.buffer.device)
        return self._places[2]

    def _grow(self, like: Tensor) -> None:
        _, heads, _, width = like.shape
        grown = like.new_empty(2, len(self.layers), 1, heads, self.capacity, width)
        if self.buffer is not None:
            grown[..., : self.buffer.shape[-2], :] = self.buffer
        self.buffer = grown
        self._rows = [(grown[0, layer], grown[1, layer]) for layer in range(len(self.layers))]

    def reserve(self, length: int) -> None:
        """Make the first allocation large enough for ``length`` positions."""
        if self.buffer is None:
            self.capacity = max(self.capacity, length)

    def keep(self, length: int, moved: list[int]) -> None:
        """Cut every layer to ``length`` positions followed by the ``moved`` ones."""
        if moved:
            end = length + len(moved)
            self.buffer[..., length:end, :] = self.buffer[..., torch.tensor(moved, device=self.buffer.device), :]
            length = end
        for layer in self.layers:
            layer.length = length

    def clear(self) -> None:
        """Forget everything; the memory stays."""
        for layer in self.layers:
            layer.length = 0


class GatheredCache(DynamicCache):
    """transformers' own DynamicCache, which concatenates at every step, cut by gathering what is kept."""

    def reserve(self, length: int) -> None:
        """It grows by itself."""

    def keep(self, length: int, moved: list[int]) -> None:
        """Cut every layer to ``length`` positions followed by the ``moved`` ones."""
        for layer in self.layers:
            if not layer.is_initialized:
                continue
            keys, values = layer.keys[:, :, :length], layer.values[:, :, :length]
            if moved:
                index = torch.tensor(moved, device=keys.device)
                keys = torch.cat([keys, layer.keys.index_select(2, index)], dim=2)
                values = torch.cat([values, layer.values.index_select(2, index)], dim=2)
            layer.keys, layer.values = keys, values

    def clear(self) -> None:
        """Forget everything."""
        self.layers = [DynamicLayer() for _ in self.layers]


def make_cache(kind: CacheKind, config) -> BufferCache | GatheredCache:
    """An empty cache for a base of full-attention layers.

    Args:
        kind: ``static`` is one preallocated buffer, ``dynamic`` transformers' own cache.
        config: Of the base.

    Raises:
        ValueError: There is no such kind.
    """
    if kind == "static":
        return BufferCache(config.num_hidden_layers)
    if kind == "dynamic":
        return GatheredCache(config=config)
    raise ValueError(f"cache must be static or dynamic, not {kind!r}")
