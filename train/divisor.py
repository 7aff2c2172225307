"""The number that losses are divided by when an optimizer step spans several processes and batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from drafters.protocol import at_least_one


class SharedDivisor:
    """Scales the loss so that gradient accumulation over uneven batches equals one large batch.

    The mean of the processes' means is not the mean over all anchors: a process with few anchors would give each of
    them more weight. Every loss is therefore divided by the mean number of anchors per process, so that the mean of
    the processes' gradients is the gradient of one large batch. When gradients are accumulated over several batches,
    each batch is weighted by its number of anchors, and the gradients are divided by the total after the last batch.
    If a loss has several terms with different counts, like Medusa's heads, the first count gives the weight.

    Args:
        add_up: Sums a tensor over all processes.
        num_processes: Number of processes.
    """

    def __init__(self, add_up: Callable[[Tensor], Tensor], num_processes: int) -> None:
        self.add_up, self.num_processes = add_up, num_processes
        self._count: Tensor | None = None  # of the current batch, over all processes, for the first term of the loss
        self._first_count = torch.ones(())  # of the step's first batch that has terms
        self._total_count = torch.zeros(())  # of the step's batches so far
        self._is_first_batch = True

    def __call__(self, count: Tensor) -> Tensor:
        """Return the mean over the processes of a process's number of terms, at least one term in total."""
        total = self.add_up(count.float())
        if self._count is None:
            self._count = total
        return at_least_one(total) / self.num_processes

    def begin(self) -> None:
        """Start a new batch."""
        self._count = None

    def weighted(self, loss: Tensor) -> Tensor:
        """Weight the loss of one accumulated batch relative to the first batch of the step that has terms."""
        assert self._count is not None, "the loss asks for its divisor before it is weighted"
        if self._is_first_batch:
            self._first_count = self._total_count = torch.zeros_like(self._count)
            self._is_first_batch = False
        # Relative to an empty batch, the next one would get so large a weight that gradients in float16 overflow.
        self._first_count = torch.where(self._total_count == 0, at_least_one(self._count), self._first_count)
        self._total_count = self._total_count + self._count
        return loss * (self._count / self._first_count)

    def correct(self, parameters: Iterable[nn.Parameter], loss_divisor: int) -> None:
        """Turn the accumulated gradients of weighted losses into gradients of the mean over all terms.

        Args:
            parameters: Parameters whose gradients are scaled in place.
            loss_divisor: What the trainer divided each loss by: the number of accumulated batches.
        """
        factor, self._is_first_batch = loss_divisor * self._first_count / at_least_one(self._total_count), True
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
