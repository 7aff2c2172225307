"""The KV cache of a draft module; it holds committed positions only, never those of a draft."""

from __future__ import annotations

from torch import Tensor


class DraftCache:
    """Keys and values per draft layer, in buffers that double when full, so that appending copies only what is new.

    Args:
        num_layers: Layers of the draft module.
    """

    def __init__(self, num_layers: int) -> None:
        self.length = 0
        self._buffers: list[list[Tensor]] = [[] for _ in range(num_layers)]

    def append(self, context: list[tuple[Tensor, Tensor]]) -> None:
        """Add the keys and values of new positions: for each layer two tensors of (1, h, S, d)."""
        length = self.length + context[0][0].shape[-2]
        for layer, new in enumerate(context):
            buffers = self._buffers[layer]
            if not buffers or buffers[0].shape[-2] < length:
                buffers = self._buffers[layer] = self._enlarged(buffers, new, length)
            for buffer, states in zip(buffers, new, strict=True):
                buffer[..., self.length : length, :] = states
        self.length = length

    def _enlarged(self, buffers: list[Tensor], new: tuple[Tensor, Tensor], length: int) -> list[Tensor]:
        enlarged = [x.new_empty(*x.shape[:-2], max(256, 2 * length), x.shape[-1]) for x in new]
        for buffer, larger in zip(buffers, enlarged, strict=False):
            larger[..., : self.length, :] = buffer[..., : self.length, :]
        return enlarged

    def truncate(self, length: int) -> None:
        """Keep at most the first ``length`` positions."""
        self.length = min(self.length, length)

    def read(self) -> list[tuple[Tensor, Tensor]]:
        """Views of the keys and values, for each layer two tensors of (1, h, length, d)."""
        return [(keys[..., : self.length, :], values[..., : self.length, :]) for keys, values in self._buffers]
