"""The base's KV cache, which keeps all positions: a buffer that is written in place."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

POSITIONS_AT_ONCE = 1024


class _BufferLayer(DynamicLayer):
    """One layer of a `BufferCache`; ``keys`` and ``values`` are views of its first ``length`` positions."""

    def __init__(self, cache: BufferCache, index: int) -> None:
        self.cache, self.index, self.length, self.is_initialized = cache, index, 0, True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append keys (B, H, q, d) and values (B, H, q, e), and return those of all positions."""
        start, self.length = self.length, self.length + key_states.shape[-2]
        keys, values = self.cache.layer_buffers(self.index, self.length, key_states, value_states)
        positions = self.cache.positions(start, self.length, keys.device)
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
    """Keys and values of all layers in one preallocated buffer (2, L, B, H, C, d), written in place.

    The width d is that of the keys or of the values, whichever is larger; the others leave the rest of it unused. A
    step writes only its own positions. Accepted nodes that are not yet at their final positions are moved for all
    layers by one copy. `keep` leaves the memory. A text that outgrows the buffer gets one of 1.5 times its length.
    Layers of other sizes than the first one, or on another device, have buffers of their own.
    """

    def __init__(self, num_layers: int, capacity: int = 512) -> None:
        self._buffer_layers = [_BufferLayer(self, index) for index in range(num_layers)]
        super().__init__(layers=list(self._buffer_layers))
        self.capacity = capacity  # number of positions C
        self.buffer: Tensor | None = None
        self.views: list[tuple[Tensor, Tensor]] = []  # keys and values of each layer, of all C positions
        self._separate: dict[int, tuple[Tensor, Tensor]] = {}  # the same of layers with buffers of their own
        self._positions: tuple[int, int, Tensor] = 0, 0, torch.empty(0)

    def layer_buffers(self, layer: int, length: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of a layer's keys (B, H, C, d) and values (B, H, C, e), with C at least ``length``.

        A new buffer takes its sizes, dtype and device from the new key states (B, H, q, d) and values (B, H, q, e).
        """
        if not self.views or length > self.capacity:
            self.grow(length, keys, values)
        pairs = zip((keys, values), self.views[layer], strict=True)
        if any(new.shape[1::2] != view.shape[1::2] or new.device != view.device for new, view in pairs):
            self._separate[layer] = self.views[layer] = self._longer(keys[:, :, :0]), self._longer(values[:, :, :0])
        return self.views[layer]

    def positions(self, start: int, end: int, device: torch.device) -> Tensor:
        """Return the positions from ``start`` to ``end``, built once per forward for all layers on a device."""
        if self._positions[:2] != (start, end) or self._positions[2].device != device:
            self._positions = start, end, torch.arange(start, end, device=device)
        return self._positions[2]

    def grow(self, length: int, keys: Tensor, values: Tensor) -> None:
        """Allocate buffers for ``length`` positions, half as long again if they grow, and copy the old ones."""
        self.capacity = self.capacity if length <= self.capacity else length + length // 2
        num_layers, old = len(self._buffer_layers), self.buffer
        if old is None:
            self._widths = keys.shape[-1], values.shape[-1]
            self.buffer = keys.new_empty(2, num_layers, *keys.shape[:2], self.capacity, max(self._widths))
        else:
            self.buffer = old.new_empty(*old.shape[:4], self.capacity, old.shape[5])
            self.buffer[..., : old.shape[-2], :] = old
        width, value_width = self._widths
        self.views = [(keys[..., :width], values[..., :value_width]) for keys, values in zip(*self.buffer, strict=True)]
        for layer, (keys, values) in self._separate.items():
            self._separate[layer] = self.views[layer] = self._longer(keys), self._longer(values)

    def _longer(self, states: Tensor) -> Tensor:
        longer = states.new_zeros(*states.shape[:2], self.capacity, states.shape[3])
        longer[:, :, : states.shape[2]] = states
        return longer

    def reserve(self, length: int) -> None:
        """Make the first allocation large enough for ``length`` positions."""
        if self.buffer is None:
            self.capacity = max(self.capacity, length)

    def keep(self, length: int, moved: list[int]) -> None:
        """Keep the first ``length`` positions, move the positions ``moved`` behind them, and drop all others."""
        if moved:
            assert self.buffer is not None, "nothing was cached yet"
            start, length, sources = length, length + len(moved), torch.tensor(moved, device=self.buffer.device)
            for states in (self.buffer, *(states for pair in self._separate.values() for states in pair)):
                states[..., start:length, :] = states[..., sources.to(states.device), :]
        for layer in self._buffer_layers:
            layer.length = length


class FixedCache(BufferCache):
    """A `BufferCache` whose tensors stay at their addresses, unless a text needs more than all texts before it.

    It has a multiple of `POSITIONS_AT_ONCE` positions, at most ``most`` unless it is asked for more.
    """

    def __init__(self, num_layers: int, most: int) -> None:
        self.most = most
        super().__init__(num_layers, capacity=min(POSITIONS_AT_ONCE, most))

    def reserve(self, length: int) -> None:
        """Have room for ``length`` positions."""
        if not self.views:
            self.capacity = max(self.capacity, self._rounded(length))
        elif length > self.capacity:
            self.grow(length, *self.views[0])

    def grow(self, length: int, keys: Tensor, values: Tensor) -> None:
        kept = self.capacity if self.views else 0
        self.capacity = max(self.capacity, self._rounded(length))
        super().grow(length, keys, values)
        assert self.buffer is not None
        self.buffer[..., kept:, :] = 0  # what is masked is multiplied by 0 and must be finite

    def _rounded(self, length: int) -> int:
        return max(length, min(length + -length % POSITIONS_AT_ONCE, self.most))
