"""How busy a machine is: whether one can measure on it, and with how many threads to decode."""

import os
import platform
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

SPARE_CORES = 0.5  # load that the system itself may cause during a measurement
MAX_GPU_PERCENT = 5
NUM_SAMPLES = 20
SAMPLING_SECONDS = 0.2


def processor_name() -> str:
    """Name of the processor, or of its architecture if the system does not say."""
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def machine_name(device: str) -> str:
    """Name of the GPU, or of the processor for a CPU."""
    return processor_name() if device == "cpu" else torch.cuda.get_device_name(device)


def num_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_average() -> float | None:
    """Average number of threads that ran or waited for a core in the last minute; None if the system does not say."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def running_threads() -> float | None:
    """Number of other threads that run or wait for a core right now, averaged over a fifth of a second.

    Unlike the load average it does not contain what ran a minute ago, such as the training before an evaluation. Where
    the system does not count running threads, it is the load average.
    """
    try:
        counts = []
        for _ in range(NUM_SAMPLES):
            time.sleep(SAMPLING_SECONDS / NUM_SAMPLES)
            (line,) = (line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("procs_running"))
            counts.append(int(line.split()[1]) - 1)  # this thread is running too
        return sum(counts) / NUM_SAMPLES
    except (OSError, ValueError):
        return load_average()


def use_idle_cores() -> None:
    """Compute with as many threads as cores are idle, and say so, unless ``OMP_NUM_THREADS`` says how many.

    A thread that shares its core makes all others wait for it at each of a step's thousand operations: beside one busy
    core, two threads decoded three times as slowly as one (docs/results/int8.md).
    """
    threads = torch.get_num_threads()
    if threads == 1 or "OMP_NUM_THREADS" in os.environ:
        return  # without the fifth of a second that counting takes
    busy = (running_threads() or 0) / (os.cpu_count() or 1)
    idle = max(1, round(num_cores() * (1 - busy)))
    if idle < threads:
        torch.set_num_threads(idle)
        print(
            f"other programs use the processor: decoding with {idle} of {threads} threads; OMP_NUM_THREADS={threads} "
            "takes them all",
            file=sys.stderr,
        )


def gpu_use(device: torch.device) -> int | None:
    """Recent utilisation of a GPU in percent; None for a CPU, or if the driver does not say."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device)
    except Exception:  # nvidia-ml-py is missing, or the driver reports nothing (MIG): the types differ
        return None


@dataclass(frozen=True)
class MachineLoad:
    """How busy the machine was before and during a measurement; what is unknown is None or empty."""

    cores: int
    threads: int  # that decode, over all processes
    before: list[float] = field(default_factory=list)  # `running_threads` before each start of the command
    during: float | None = None  # the highest `load_average` at the end of an answer
    gpu_percents: list[int] = field(default_factory=list)  # `gpu_use` before each start

    def warnings(self) -> list[str]:
        """One line for each sign that other work disturbed the measured times."""
        lines = []
        if self.before and max(self.before) + self.threads > self.cores + SPARE_CORES:
            lines.append(
                f"the machine was busy before the run: load {max(self.before):.1f} in addition to {self.threads} "
                f"decoding thread{'' if self.threads == 1 else 's'} on {self.cores} cores"
            )
        if self.during and self.during > max(self.cores, self.threads) + SPARE_CORES:
            lines.append(f"the machine was busy during the run: load up to {self.during:.1f} on {self.cores} cores")
        if self.gpu_percents and max(self.gpu_percents) > MAX_GPU_PERCENT:
            lines.append(f"the GPU was busy before the run: {max(self.gpu_percents)} % utilisation")
        return lines
