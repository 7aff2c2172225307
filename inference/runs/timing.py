"""Whether the machine is quiet enough for a measurement: its load, and what a decoding thread gets of a core."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

ROOM = 0.5  # of a core: what the machine itself may need beside a measurement
LEAST_SHARE = 0.95  # of a core, that a decoding thread has on a quiet machine
MOST_GPU_USE = 5  # per cent
NUM_LOOKS = 20


class CoreClock:
    """Wall time, and how much of it this thread had a core: it decodes all the while, and waits where others work."""

    def __init__(self) -> None:
        self._wall, self._thread = time.perf_counter(), time.thread_time()

    def share(self) -> float:
        """The share of the time since it was made."""
        return (time.thread_time() - self._thread) / max(time.perf_counter() - self._wall, 1e-9)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load() -> float | None:
    """Threads that ran or waited for a core, on average over the last minute; None where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def running() -> float | None:
    """Threads of others that run or wait for a core just now, over a fifth of a second; else `load`.

    What a command did a minute ago, as a training before this evaluation, still counts in the load average.
    """
    try:
        counts = []
        for _ in range(NUM_LOOKS):
            time.sleep(0.2 / NUM_LOOKS)
            (line,) = (line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("procs_running"))
            counts.append(int(line.split()[1]) - 1)  # it is we who look
        return sum(counts) / NUM_LOOKS
    except (OSError, ValueError):
        return load()


def gpu_use(device: torch.device) -> int | None:
    """Per cent of the last moments in which a GPU ran a kernel; None where unknown."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device)
    except Exception:  # without nvidia-ml-py, or where the driver does not tell (MIG): each raises a type of its own
        return None


@dataclass(frozen=True)
class Quiet:
    """How quiet the machine was.

    Args:
        threads: Threads that decode, of all processes.
        cores: Cores there are.
        before: `running` before each start of the command: several where it was stopped and went on.
        during: `load` at the end of each answer.
        shares: `CoreClock.share` of each answer.
        gpu_use: `gpu_use` before each start, where known.
    """

    threads: int
    cores: int
    before: Sequence[float] = ()
    during: Sequence[float] = ()
    shares: Sequence[float] = ()
    gpu_use: Sequence[int] = ()

    def warnings(self) -> list[str]:
        """What speaks against the times, a line each."""
        found = []
        if self.before and max(self.before) + self.threads > self.cores + ROOM:
            found.append(
                f"the machine was busy before this began: load {max(self.before):.1f} beside {self.threads} own "
                f"threads on {self.cores} cores"
            )
        if self.during and max(self.during) > max(self.cores, self.threads) + ROOM:
            found.append(f"the machine was busy: load up to {max(self.during):.1f} on {self.cores} cores")
        if self.shares and self._share() < LEAST_SHARE:
            found.append(f"decoding waited for a core {100 * (1 - self._share()):.0f} % of the time")
        if self.gpu_use and max(self.gpu_use) > MOST_GPU_USE:
            found.append(f"the GPU was busy before this began: {max(self.gpu_use)} % in use")
        return found

    def told(self) -> str:
        """The same in one line, however quiet it was."""
        parts = [f"{self.cores} cores, {self.threads} threads decode"]
        if self.before:
            parts.append(f"load {', '.join(f'{value:.1f}' for value in self.before)} before")
        if self.during:
            parts.append(f"up to {max(self.during):.1f} meanwhile")
        if self.shares:
            parts.append(f"decoding had a core {100 * self._share():.0f} % of the time")
        if self.gpu_use:
            parts.append(f"GPU {', '.join(map(str, self.gpu_use))} % in use before")
        return ", ".join(parts)

    def _share(self) -> float:
        return sum(self.shares) / len(self.shares)
