"""A machine that is too busy to measure on is noticed."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from inference.timing import MachineLoad, running_threads

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


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux counts running threads")
def test_threads_that_run_right_now_are_counted():
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in range(6)]
    try:
        time.sleep(0.5)
        assert running_threads() > 4
    finally:
        for other in others:
            other.kill()
            other.wait()
