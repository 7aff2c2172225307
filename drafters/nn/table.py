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
        numbers = self.numbers.to("cpu", non_blocking=True)  # from a GPU into pinned memory
        if self.numbers.is_cuda:
            torch.cuda.current_stream(self.numbers.device).synchronize()
        parts = np.split(numbers.numpy(), np.cumsum([shape.numel() for shape in self.shapes])[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]
