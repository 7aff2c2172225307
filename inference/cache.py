"""The base's KV cache: one buffer a layer, written in place, so that a step copies only its own rows."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class BufferLayer(DynamicLayer):
    """Keys and values of one layer in a buffer that doubles when it is full.

    ``keys`` and ``values`` are views of the first ``length`` positions, (B, H, length, d).
    """

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Add (B, H, q, d) at the end and return all there is."""
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self._keys = self._values = self.keys = self.values = key_states.new_empty(0, 0, 0, 0)
        start, self.length = self.length, self.length + key_states.shape[-2]
        if self._keys.shape[-2] < self.length:
            self._keys, self._values = (self._grown(self.keys, key_states), self._grown(self.values, value_states))
        self._keys[..., start : self.length, :] = key_states
        self._values[..., start : self.length, :] = value_states
        self._view()
        return self.keys, self.values

    def _grown(self, held: Tensor, like: Tensor) -> Tensor:
        grown = like.new_empty(*like.shape[:-2], max(256, 2 * self.length), like.shape[-1])
        if held.numel():
            grown[..., : held.shape[-2], :] = held
        return grown

    def _view(self) -> None:
        self.keys, self.values = self._keys[..., : self.length, :], self._values[..., : self.length, :]

    def keep(self, length: int, moved: Tensor | None) -> None:
        """Keep the first positions and then those ``moved`` names, copied into place; the rest is forgotten."""
        if moved is not None:
            end = length + len(moved)
            self._keys[..., length:end, :] = self._keys.index_select(-2, moved)
            self._values[..., length:end, :] = self._values.index_select(-2, moved)
            length = end
        self.length = length
        self._view()

    def get_seq_length(self) -> int:
        return self.length


def buffer_cache(num_layers: int) -> Cache:
    """An empty cache for a base of ``num_layers`` full-attention layers."""
    return Cache(layers=[BufferLayer() for _ in range(num_layers)])


def keep(cache: Cache, length: int, moved: list[int]) -> None:
    """Cut every layer to ``length`` positions followed by the ``moved`` ones.

    Rows that already stand where they belong are not copied.
    """
    while moved and moved[0] == length:
        length, moved = length + 1, moved[1:]
    index = torch.tensor(moved, device=cache.layers[0].keys.device) if moved else None
    for layer in cache.layers:
        layer.keep(length, index)
