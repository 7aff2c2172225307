"""When a machine is too busy to measure on."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from inference.runs.timing import CoreClock, Quiet, load, num_cores, running

QUIET = {"threads": 1, "cores": 4, "before": [0.2], "during": [1.2, 1.3], "shares": [0.99, 1.0], "gpu_use": [0]}


def test_a_quiet_machine_gives_no_warning():
    assert Quiet(**QUIET).warnings() == []
    assert Quiet(threads=2, cores=2).warnings() == [], "where nothing is known, nothing is said"


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"before": [3.8]}, "busy before this began: load 3.8"),
        ({"before": [0.2, 3.8]}, "busy before this began: load 3.8"),
        ({"during": [1.2, 4.9]}, "load up to 4.9 on 4 cores"),
        ({"shares": [0.9, 0.7]}, "waited for a core 20 % of the time"),
        ({"gpu_use": [40]}, "GPU was busy before this began: 40 %"),
    ],
)
def test_each_sign_of_other_work_is_named(changed, said):
    quiet = Quiet(**QUIET | changed)
    (line,) = quiet.warnings()
    assert said in line
    assert "4 cores, 1 threads" in quiet.told()


def test_own_threads_on_all_cores_are_no_other_work():
    assert Quiet(threads=4, cores=4, before=[0.1], during=[4.2], shares=[1.0]).warnings() == []
    assert Quiet(threads=4, cores=4, before=[1.0]).warnings()


def test_a_thread_that_waits_has_no_core():
    clock = CoreClock()
    time.sleep(0.2)
    assert clock.share() < 0.5


def test_a_core_clock_counts_its_own_thread_alone():
    stop = threading.Event()
    other = threading.Thread(target=lambda: [None for _ in iter(stop.is_set, True)])
    clock = CoreClock()
    other.start()
    time.sleep(0.2)
    share = clock.share()
    stop.set()
    other.join()
    assert share < 0.9


def test_the_machine_tells_its_cores_and_its_load():
    assert num_cores() >= 1
    found = load()
    assert found is None or found >= 0


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux counts the threads that run")
def test_threads_that_run_just_now_are_counted():
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in range(6)]
    try:
        time.sleep(0.5)
        assert running() > 4
    finally:
        for other in others:
            other.kill()
            other.wait()
