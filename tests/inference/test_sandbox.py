"""Hostile programs in bubblewrap."""

import os
import shutil
import socket
import time
from pathlib import Path

import pytest

from inference import sandbox
from inference.sandbox import finishes

pytestmark = pytest.mark.skipif(not shutil.which("bwrap"), reason="needs bubblewrap: apt-get install bubblewrap")


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "precious.txt"
    path.write_text("precious")
    return path


@pytest.mark.parametrize(
    "program",
    [
        "import json, re, math, random, datetime, hashlib, itertools, collections, heapq, typing\nhashlib.md5(b'')",
        "from numpy import ones\nassert ones(3).sum() == 3",
        "open('a.txt', 'w').write('a')\nimport os\nos.rename('a.txt', 'b.txt')\nassert os.listdir('.') == ['b.txt']",
        "import sys\nsys.setrecursionlimit(10000)\nf = lambda n: n and 1 + f(n - 1)\nassert f(5000) == 5000",
        "import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()",
        "assert open('/proc/self/status').read()",
    ],
)
def test_a_harmless_program_finishes(program):
    assert finishes(program)


@pytest.mark.parametrize(
    "program",
    [
        "assert 1 + 1 == 3",
        "def f(:",
        "exit()",
        "import os\nos._exit(0)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "input()",
    ],
)
def test_a_program_that_does_not_reach_its_last_line_has_not_finished(program):
    assert not finishes(f"{program}\n")


@pytest.mark.parametrize(
    "program",
    [
        "open(target, 'w')",
        "open('/usr/new', 'x')",
        "open('/etc/passwd')",
        "import os\nos.remove(target)",
        "import subprocess\nsubprocess.run(['touch', target + '.new'], check=True)",
        "import ctypes\nassert ctypes.CDLL(None).mount(b'none', b'/usr', b'tmpfs', 0, None) == 0",
        "import os\nos.setuid(1)",
        "import os\nos.chroot('.')",
    ],
)
def test_nothing_outside_of_its_own_folder_is_read_or_written(program, target):
    assert not finishes(f"target = {str(target)!r}\n{program}\n")
    assert target.read_text() == "precious" and os.listdir(target.parent) == [target.name]


def test_secrets_are_not_there(target, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "hunter2")
    places = [str(target), f"/proc/{os.getpid()}/environ", str(Path.home() / ".bashrc"), "/etc/passwd"]
    looks = f"for place in {places!r}:\n    assert not os.path.exists(place)"
    assert finishes(f"import os\nassert 'hunter2' not in str(os.environ)\n{looks}")


def test_no_other_process_and_no_network_is_reached():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert not finishes(f"import socket\nsocket.create_connection(('127.0.0.1', {port}))")
        assert not finishes(f"import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{port}', timeout=1)")
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert not finishes(f"import os\nos.kill({os.getpid()}, 9)")
    assert finishes("import os\nassert len([name for name in os.listdir('/proc') if name.isdigit()]) <= 2")


@pytest.mark.parametrize(
    "program",
    [
        "while True: print('x' * 1000)",
        "'a' * 10**12",
        "x = []\nwhile True: x.append(bytearray(2**20))",
        "x = [open(f'{n}', 'wb') for n in range(30)]\nfor file in x: file.write(bytes(2**22)), file.flush()",
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    ],
)
def test_memory_files_and_output_are_limited(program):
    started = time.monotonic()
    assert not finishes(program)
    assert time.monotonic() - started < 8, "the limit ends it, and not the clock"


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import signal, time\nfor s in (2, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(1000)",
        "import os, time\nfor _ in range(5): os.fork()\ntime.sleep(1000)",
    ],
)
def test_an_endless_program_is_stopped_with_all_its_processes(program, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mark = f"# {tmp_path}\n"
    assert not finishes(mark + program, seconds=0.5)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "run in bubblewrap, which is not installed: install bubblewrap .apt-get install bubblewrap."),
        ("echo 'bwrap: setting up uid map: denied' >&2; exit 1", "does not work here .bwrap: setting up uid"),
    ],
)
def test_without_bubblewrap_no_program_is_run(script, said, tmp_path, monkeypatch):
    if script:
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + (f":{os.environ['PATH']}" if script else ""))
    sandbox.require.cache_clear()
    with pytest.raises(ValueError, match=said):
        finishes("print('never run')")
    sandbox.require.cache_clear()
