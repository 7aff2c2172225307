"""The number that losses are divided by when an optimizer step spans several processes and batches."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from drafters.protocol import at_least_one


class SharedDivisor:
    """Scales the loss so that gradient accumulation over uneven batches equals one large batch.

    If each process divided its loss by the number of its anchors, the anchors of a process with few of them would count
    more. Every loss is therefore divided by the mean number of anchors per process, and the mean of the processes'
    gradients is the gradient of one large batch. When gradients are accumulated over several batches, each batch is
    weighted by its number of anchors, and the gradients are divided by the total after the last batch. A loss with
    several terms, such as one for each of Medusa's heads, is weighted by the number of anchors in its first term.

    ``add_up`` sums a tensor over all processes.
    """

    def __init__(self, add_up: Callable[[Tensor], Tensor], num_processes: int) -> None:
        self.add_up, self.num_processes = add_up, num_processes
        self._count: Tensor | None = None  # of the running batch, over all processes, for the first term of its loss
        self._total: Tensor | None = None  # of the step's batches so far
        self._first: Tensor  # of the step's first batch that has terms

    def __call__(self, count: Tensor) -> Tensor:
        """Return the mean over the processes of a process's number of terms, at least one term in total."""
        total = self.add_up(count.float())
        self._count = total if self._count is None else self._count
        return at_least_one(total) / self.num_processes

    def weighted(self, loss: Tensor) -> Tensor:
        """Weight the loss of an accumulated batch by its count, relative to that of the step's first batch.

        Relative to an empty batch, the next one would get so large a weight that gradients in float16 overflow.
        """
        assert self._count is not None, "the loss asks for its divisor before it is weighted"
        count, self._count = self._count, None
        if self._total is None:
            self._first, self._total = count, torch.zeros_like(count)
        self._first = torch.where(self._total == 0, at_least_one(count), self._first)
        self._total = self._total + count
        return loss * (count / self._first)

    def correct(self, parameters: Iterable[nn.Parameter], num_batches: int) -> None:
        """Turn the accumulated gradients of weighted losses into gradients of the mean over all terms, in place.

        The trainer has divided each loss by ``num_batches``, the number of accumulated batches.
        """
        assert self._total is not None, "a step has batches"
        factor, self._total = num_batches * self._first / at_least_one(self._total), None
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
