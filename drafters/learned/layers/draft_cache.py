"""Keys and values of committed positions in a draft module; what a block adds is never kept."""

from __future__ import annotations

from torch import Tensor


class DraftCache:
    """One growing buffer per draft layer, doubled when full, so that appending copies only what is new.

    Args:
        num_layers: Layers of the draft module.
    """

    def __init__(self, num_layers: int) -> None:
        self.length = 0
        self._buffers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    def append(self, context: list[tuple[Tensor, Tensor]]) -> None:
        """Add keys and values, per layer two of (1, h, S, d)."""
        added = context[0][0].shape[-2]
        needed = self.length + added
        for layer, new in enumerate(context):
            buffers = self._buffers[layer]
            if buffers is None or buffers[0].shape[-2] < needed:
                buffers = self._buffers[layer] = tuple(
                    self._grown(b, n, needed) for b, n in zip(buffers or (None, None), new, strict=True)
                )
            for buffer, states in zip(buffers, new, strict=True):
                buffer[..., self.length : needed, :] = states
        self.length = needed

    def _grown(self, buffer: Tensor | None, like: Tensor, needed: int) -> Tensor:
        grown = like.new_empty(*like.shape[:-2], max(256, 2 * needed), like.shape[-1])
        if buffer is not None:
            grown[..., : self.length, :] = buffer[..., : self.length, :]
        return grown

    def truncate(self, length: int) -> None:
        """Forget all but the first ``length`` positions, if more are held."""
        self.length = min(self.length, length)

    def read(self) -> list[tuple[Tensor, Tensor]]:
        """Per layer, views of the keys and values held: two of (1, h, length, d)."""
        return [(keys[..., : self.length, :], values[..., : self.length, :]) for keys, values in self._buffers]
