"""A machine that is too busy to measure on is noticed."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from inference.timing import MachineLoad, running_threads, use_idle_cores

IDLE = {"threads": 1, "cores": 4, "before": [0.2], "during": 1.3, "gpu_percents": [0]}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"before": [0.2, 3.8]}, "busy before the run: load 3.8"),
        ({"during": 4.9}, "load up to 4.9 on 4 cores"),
        ({"gpu_percents": [40]}, "GPU was busy before the run: 40 %"),
    ],
)
def test_each_sign_of_other_work_is_named(change, message):
    machine = MachineLoad(**IDLE | change)
    (line,) = machine.warnings()
    assert message in line


def test_an_idle_machine_and_decoding_threads_on_all_cores_give_no_warning():
    assert MachineLoad(**IDLE).warnings() == []
    assert MachineLoad(2, 2).warnings() == [], "without measurements there is no warning"
    assert MachineLoad(4, 4, before=[0.1], during=4.2).warnings() == []
    assert MachineLoad(4, 4, before=[1.0]).warnings()


@contextmanager
def busy_programs(count):
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in range(count)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux counts running threads")
def test_threads_that_run_right_now_are_counted_and_keep_their_cores(monkeypatch, capsys):
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with busy_programs(os.cpu_count() + 4):
            assert running_threads() > os.cpu_count() + 2
            monkeypatch.setenv("OMP_NUM_THREADS", "4")
            use_idle_cores()
            assert (torch.get_num_threads(), capsys.readouterr().err) == (4, ""), "the user has said how many"
            monkeypatch.delenv("OMP_NUM_THREADS")
            use_idle_cores()
            assert torch.get_num_threads() == 1
            assert "decoding with 1 of 4 threads; OMP_NUM_THREADS=4 takes them all" in capsys.readouterr().err
    finally:
        torch.set_num_threads(threads)


def test_an_idle_machine_decodes_with_all_threads(monkeypatch, capsys):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("inference.timing.running_threads", lambda: 0.1)
    monkeypatch.setattr("inference.timing.num_cores", lambda: 4)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        use_idle_cores()
        assert (torch.get_num_threads(), capsys.readouterr().err) == (4, "")
    finally:
        torch.set_num_threads(threads)
