"""What losses are divided by where one optimizer step is shared out over processes and batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from drafters.protocol import at_least_one


class SharedDivisor:
    """Makes an optimizer step that of one big batch, however unequally its anchors fall to processes and batches.

    The mean of the processes' means is not the mean over all anchors: where one process has few, each of its anchors
    would count for more. So a loss is divided by the mean count of all processes, and their gradients' mean is the
    right one. Where gradients are accumulated over several batches, each batch weighs as much as it has anchors; what
    the sum is to be divided by is known at the last of them. A loss of several terms with counts of their own, as
    Medusa's heads, weighs its batches by the first count.

    Args:
        add_up: Sums a tensor over all processes.
        num_processes: How many there are.
    """

    def __init__(self, add_up: Callable[[Tensor], Tensor], num_processes: int) -> None:
        self.add_up, self.num_processes = add_up, num_processes
        self._count: Tensor | None = None  # of this batch in all processes, by the loss's first term
        self._first = self._sum = torch.ones(())  # the same of the step's first batch, and of its batches so far
        self._is_first = True

    def __call__(self, count: Tensor) -> Tensor:
        """Of a process's count of terms, the mean over the processes: of all of them one at least."""
        total = at_least_one(self.add_up(count.float()))
        if self._count is None:
            self._count = total
        return total / self.num_processes

    def begin(self) -> None:
        """The next count is the first of a batch."""
        self._count = None

    def weighed(self, loss: Tensor) -> Tensor:
        """The loss of one of the batches that a step accumulates, weighed against its first batch."""
        if self._is_first:
            self._first, self._sum, self._is_first = self._count, torch.zeros_like(self._count), False
        self._sum = self._sum + self._count
        return loss * (self._count / self._first)

    def correct(self, parameters: Iterable[nn.Parameter], with_divisor: int) -> None:
        """Make of accumulated gradients of weighed losses those of the mean over all terms.

        Args:
            divided_by: What the trainer has divided each loss by.
        """
        factor, self._is_first = with_divisor * self._first / self._sum, True
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
