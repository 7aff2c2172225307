"""While a drafter is trained on CPUs, freed memory stays with the process."""

import platform
import subprocess
import sys

import lightning as L
import torch

from train.callbacks import freed_memory

PROGRAM = """
import sys, torch
from pathlib import Path
from train.callbacks.freed_memory import keep_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

if sys.argv[1] == "kept":
    assert keep_freed_memory()
torch.ones(5_000_000)  # what the first tensor needs besides its memory
before = resident()
tensor = torch.ones(7_500_000)  # 30 MB
del tensor
print(resident() - before)
"""


def test_freed_memory_stays_with_the_process(repository):
    if platform.libc_ver()[0] != "glibc":
        assert not freed_memory.keep_freed_memory()
        return

    def grown(argument):
        command = [sys.executable, "-c", PROGRAM, argument]
        return int(subprocess.run(command, cwd=repository, capture_output=True, check=True).stdout)

    assert grown("kept") > 5e6 > grown("given back")


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.delattr(freed_memory.ctypes, "CDLL")  # which must not be called
    assert not freed_memory.keep_freed_memory()


def test_it_is_kept_from_the_first_step_of_a_training_on_cpus_only(monkeypatch):
    calls = []
    monkeypatch.setattr(freed_memory, "keep_freed_memory", lambda: calls.append("kept"))
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    callback = freed_memory.FreedMemory()
    callback.on_train_start(trainer, L.LightningModule())
    assert calls == ["kept"]
    monkeypatch.setattr(type(trainer.strategy), "root_device", torch.device("meta"))
    callback.on_train_start(trainer, L.LightningModule())
    assert calls == ["kept"]
