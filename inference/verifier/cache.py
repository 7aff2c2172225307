"""The base's KV cache, which keeps all positions: one buffer for all layers, or transformers' own DynamicCache."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

CacheKind = Literal["static", "dynamic"]


class _BufferLayer(DynamicLayer):
    """One layer of a `BufferCache`; ``keys`` and ``values`` are views of its first ``length`` positions."""

    def __init__(self, cache: BufferCache, index: int) -> None:
        self.cache, self.index, self.length, self.is_initialized = cache, index, 0, True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append keys (1, H, q, d) and values (1, H, q, e), and return those of all positions."""
        start, self.length = self.length, self.length + key_states.shape[-2]
        keys, values = self.cache.layer_buffers(self.index, self.length, key_states, value_states)
        positions = self.cache.positions(start, self.length)
        keys.index_copy_(2, positions, key_states)
        values.index_copy_(2, positions, value_states)
        return keys.narrow(2, 0, self.length), values.narrow(2, 0, self.length)

    @property
    def keys(self) -> Tensor:  # type: ignore[override]  # transformers reads it as an attribute and never sets ours
        return self.cache.views[self.index][0][:, :, : self.length]

    @property
    def values(self) -> Tensor:  # type: ignore[override]  # as for the keys
        return self.cache.views[self.index][1][:, :, : self.length]

    def get_seq_length(self) -> int:
        return self.length


class BufferCache(Cache):
    """Keys and values of all layers in one preallocated buffer (2, L, 1, H, C, d), written in place.

    The width d is that of the keys or of the values, whichever is larger; the others leave the rest of it unused. A
    step writes only its own positions. Accepted nodes that are not yet at their final positions are moved for all
    layers by one copy. `clear` keeps the memory. A text that outgrows the buffer gets one of 1.5 times its length.
    """

    def __init__(self, num_layers: int, capacity: int = 512) -> None:
        self._buffer_layers = [_BufferLayer(self, index) for index in range(num_layers)]
        super().__init__(layers=list(self._buffer_layers))
        self.capacity = capacity  # number of positions C
        self.buffer: Tensor | None = None
        self.views: list[tuple[Tensor, Tensor]] = []  # keys and values of each layer, of all C positions
        self._positions: tuple[int, int, Tensor] | None = None

    def layer_buffers(self, layer: int, length: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of a layer's keys (1, H, C, d) and values (1, H, C, e), with C at least ``length``.

        A new buffer takes its sizes, dtype and device from the new key states (1, H, q, d) and values (1, H, q, e).

        Raises:
            ValueError: The layer's keys and values have other sizes than those of the first layer.
        """
        if not self.views or length > self.capacity:
            self.grow(length, keys, values)
        views = self.views[layer]
        if any(new.shape[1::2] != view.shape[1::2] for new, view in zip((keys, values), views, strict=True)):
            raise ValueError(
                f"layer {layer} has keys and values of its own sizes, and the static cache holds one size for all "
                "layers: pass cache='dynamic'"
            )
        return views

    def positions(self, start: int, end: int) -> Tensor:
        """Return the positions from ``start`` to ``end``, built once per forward for all layers."""
        if self._positions is None or self._positions[:2] != (start, end):
            self._positions = start, end, torch.arange(start, end, device=self.views[0][0].device)
        return self._positions[2]

    def grow(self, length: int, keys: Tensor, values: Tensor) -> None:
        """Allocate a buffer for ``length`` positions, half as long again if it grows, and copy the old one into it."""
        self.capacity = self.capacity if length <= self.capacity else length + length // 2
        _, num_heads, _, key_dim = keys.shape
        value_dim, num_layers = values.shape[-1], len(self._buffer_layers)
        grown = keys.new_empty(2, num_layers, 1, num_heads, self.capacity, max(key_dim, value_dim))
        if self.buffer is not None:
            grown[..., : self.buffer.shape[-2], :] = self.buffer
        self.buffer = grown
        self.views = [(grown[0, layer, ..., :key_dim], grown[1, layer, ..., :value_dim]) for layer in range(num_layers)]

    def reserve(self, length: int) -> None:
        """Make the first allocation large enough for ``length`` positions."""
        if self.buffer is None:
            self.capacity = max(self.capacity, length)

    def keep(self, length: int, moved: list[int]) -> None:
        """Keep the first ``length`` positions, move the positions ``moved`` behind them, and drop the others."""
        if moved:
            assert self.buffer is not None, "nothing was cached yet"
            start, length = length, length + len(moved)
            moved_index = torch.tensor(moved, device=self.buffer.device)
            self.buffer[..., start:length, :] = self.buffer[..., moved_index, :]
        for layer in self._buffer_layers:
            layer.length = length

    def clear(self) -> None:
        """Drop all positions and keep the memory."""
        for layer in self._buffer_layers:
            layer.length = 0


class GatheredCache(DynamicCache):
    """transformers' own DynamicCache, which concatenates in every forward; cutting it gathers what is kept.

    All layers keep all positions, also those of a sliding window: what a token sees is the mask's business alone.
    """

    def reserve(self, length: int) -> None:
        """Do nothing: this cache grows with every forward."""

    def keep(self, length: int, moved: list[int]) -> None:
        """Keep the first ``length`` positions, move the positions ``moved`` behind them, and drop the others."""
        index: Tensor | None = None
        for layer in self.layers:
            assert isinstance(layer, DynamicLayer), "this cache makes no layers of other kinds"
            if not layer.is_initialized:
                continue
            assert layer.keys is not None and layer.values is not None
            keys, values = layer.keys[:, :, :length], layer.values[:, :, :length]
            if moved:
                if index is None or index.device != keys.device:  # the layers may be on several devices
                    index = torch.tensor(moved, device=keys.device)
                keys = torch.cat([keys, layer.keys.index_select(2, index)], dim=2)
                values = torch.cat([values, layer.values.index_select(2, index)], dim=2)
            layer.keys, layer.values = keys, values

    def clear(self) -> None:
        """Drop all positions."""
        self.layers = [DynamicLayer() for _ in self.layers]


def make_cache(kind: CacheKind, config: PretrainedConfig) -> BufferCache | GatheredCache:
    """Create an empty cache that keeps the keys and values of all positions in all layers of a base.

    Raises:
        ValueError: ``kind`` is neither ``static``, one preallocated buffer, nor ``dynamic``, transformers' own cache.
    """
    if kind == "static":
        return BufferCache(config.num_hidden_layers)
    if kind == "dynamic":
        return GatheredCache()  # without the configuration, which would make layers that drop positions
    raise ValueError(f"cache must be static or dynamic, not {kind!r}")
