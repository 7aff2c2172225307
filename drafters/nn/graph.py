"""CUDA graphs: what a GPU computes from tensors at fixed addresses, launched as one."""

from collections.abc import Callable
from functools import cache
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
NUM_WARM_UP = 2  # calls before the capture: they compile, choose kernels and allocate workspaces


class Graph(Generic[T]):
    """A function that is called once for each input, although its inputs and results stay at their addresses.

    The function takes no arguments: it reads tensors, writes tensors, and returns tensors, whose values the next call
    overwrites. It must not wait for the device, and everything that changes from call to call must be in a tensor. On a
    GPU it is captured now, and then replayed with one launch; elsewhere it is called.
    """

    def __init__(self, function: Callable[[], T], device: torch.device) -> None:
        self._replay = captured(function, device)

    @torch.inference_mode()
    def __call__(self) -> T:
        return self._replay()


@torch.inference_mode()
def captured(function: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Capture a function in a CUDA graph, and return what replays it and returns the same tensors again."""
    if device.type != "cuda":
        return function
    stream, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(NUM_WARM_UP):
            function()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=_memory_pool(device)):
        results = function()

    def replay() -> Any:
        graph.replay()
        return results

    return replay


@cache
def _memory_pool(device: torch.device) -> Any:
    """The memory of all graphs of a device: one runs at a time, so they share what they need while they run."""
    return torch.cuda.graph_pool_handle()


class HostBuffer:
    """Integers that a step reads, on the host and at a fixed address of a device, with one copy that does not wait.

    Args:
        shape: Shape of both tensors.
        device: The device; on a CPU both are one tensor.
    """

    def __init__(self, *shape: int, device: torch.device) -> None:
        self.host = torch.zeros(shape, dtype=torch.long, pin_memory=device.type == "cuda")
        self.numbers = self.host.numpy()
        self.device = self.host if device.type == "cpu" else self.host.to(device)

    def send(self) -> None:
        """Copy the numbers to the device, behind the work that is queued there."""
        if self.device is not self.host:
            self.device.copy_(self.host, non_blocking=True)
