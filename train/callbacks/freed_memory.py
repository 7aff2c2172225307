"""Keeps the memory that tensors free, while a drafter is trained on CPUs."""

from __future__ import annotations

import ctypes
import platform

import lightning as L

# Parameters of glibc's mallopt, from malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_MMAP_THRESHOLD = 2**25  # glibc refuses more
LARGEST_INT = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let glibc reuse freed memory instead of giving it back to the system, and return whether it agreed.

    By default it gives back blocks larger than any that were freed before, and the end of the heap beyond twice their
    size; the system fills with zeros what it hands out again. The setting lasts as long as the process.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD) and mallopt(M_TRIM_THRESHOLD, LARGEST_INT))


class FreedMemory(L.Callback):
    """Calls `keep_freed_memory` before the first step of a training on CPUs.

    Memory is measured before that, by `Estimate`.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.strategy.root_device.type == "cpu":
            keep_freed_memory()
