"""CUDA graphs: what a GPU computes from tensors at fixed addresses, launched as one."""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")
NUM_WARM_UP = 2  # calls before the capture: they compile, choose kernels and allocate workspaces


@torch.inference_mode()
def captured(function: Callable[[], T], device: torch.device) -> Callable[[], T]:
    """Capture a function in a CUDA graph, and return what replays it with one launch; elsewhere what calls it.

    The function takes no arguments: it reads tensors, writes tensors, and returns tensors, whose values the next call
    overwrites. It must not wait for the device, and everything that changes from call to call must be in a tensor.
    Raises RuntimeError if it waits, before a capture that it would end in a state from which torch does not recover.
    """
    if device.type != "cuda":
        return torch.inference_mode()(function)
    (stream, first), current = _capturing(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        for _ in range(NUM_WARM_UP - 1):
            function()
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")  # what waits for the device raises RuntimeError
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads, of a server say, may allocate meanwhile.
    options: dict[str, Any] = {"pool": first.pool(), "stream": stream, "capture_error_mode": "thread_local"}
    with torch.cuda.device(device), torch.cuda.graph(graph, **options):
        results = function()

    def replay() -> T:
        graph.replay()
        return results

    return replay


@cache
def _capturing(device: torch.device) -> tuple[Any, Any]:
    """The stream of a device on which graphs are captured, and a first graph, whose memory all others share.

    One graph runs at a time, so what each needs while it runs may be the same memory; it is kept as long as this graph.
    Its name is valid only while a graph uses it, so this one is never dropped.
    """
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph, stream=stream):
        torch.zeros(1, device=device)
    return stream, graph


class HostBuffer:
    """Integers that a step reads, on the host and at a fixed address of a device, with one copy that does not wait.

    Args:
        shape: Shape of both tensors.
        device: The device; on a CPU both are one tensor.
    """

    def __init__(self, *shape: int, device: torch.device) -> None:
        self.host = torch.zeros(shape, dtype=torch.long, pin_memory=device.type == "cuda")
        self._numbers = self.host.numpy()
        self._sent = torch.cuda.Event() if device.type == "cuda" else None
        self.device = self.host if device.type == "cpu" else self.host.to(device)

    @property
    def numbers(self) -> np.ndarray:
        """The integers on the host, which the last copy has read by now, to be changed."""
        if self._sent is not None:
            self._sent.synchronize()
        return self._numbers

    def send(self) -> None:
        """Copy the numbers to the device, behind the work that is queued there."""
        if self.device is not self.host:
            self.device.copy_(self.host, non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self.device.device))
