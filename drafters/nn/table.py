"""What a draft module computes on the device, side by side in one tensor, which comes to the host with one copy."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Table(NamedTuple):
    """Several tensors in one; float32 holds token ids exactly."""

    numbers: Tensor  # of all parts, one part after the other
    shapes: list[torch.Size]  # of the parts

    @classmethod
    def of(cls, parts: Sequence[Tensor], dtype: torch.dtype) -> "Table":
        """The table of these tensors, in one dtype."""
        return cls(torch.cat([part.flatten().to(dtype) for part in parts]), [part.shape for part in parts])

    def on_host(self) -> list[np.ndarray]:
        """The parts; this waits for the device."""
        ends = np.cumsum([shape.numel() for shape in self.shapes])[:-1]
        parts = np.split(self.numbers.cpu().numpy(), ends)
        return [numbers.reshape(shape) for numbers, shape in zip(parts, self.shapes, strict=True)]
