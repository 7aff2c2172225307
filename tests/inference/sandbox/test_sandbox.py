"""Hostile programs in the sandbox, once with the kernel's locks and once with the audit hook alone."""

import os
import socket
import sys
import time
from pathlib import Path

import pytest

from inference.sandbox.sandbox import ResourceLimits, run

SHORT = ResourceLimits(seconds=8, cpu_seconds=4, memory_bytes=2**28, file_bytes=2**20, folder_bytes=2**22)
both_locks = pytest.mark.parametrize("use_kernel", [True, False], ids=["kernel", "hook"])
LOCKS = run("").locks
kernel_only = pytest.mark.skipif("hook" in LOCKS, reason="the kernel has no Landlock or seccomp")


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "precious.txt"
    path.write_text("precious")
    return path


@both_locks
@pytest.mark.parametrize(
    "program",
    [
        "print(sum(range(5)))",
        "import json, re, math, random, datetime, hashlib, itertools, collections, heapq, typing\nhashlib.md5(b'')",
        "from numpy import ones\nassert ones(3).sum() == 3",
        "open('a.txt', 'w').write('a')\nimport os\nos.rename('a.txt', 'b.txt')\nassert os.listdir('.') == ['b.txt']",
        "import tempfile\nwith tempfile.NamedTemporaryFile('w') as file:\n    file.write('x')",
        "import sys\nsys.setrecursionlimit(10000)\nf = lambda n: n and 1 + f(n - 1)\nassert f(5000) == 5000",
        "import sys\nsys.stdout.close()",
    ],
)
def test_a_harmless_program_finishes(program, use_kernel):
    outcome = run(program, use_kernel=use_kernel)
    assert outcome.has_finished and outcome.reason == "finished", outcome


def test_threads_are_allowed():
    assert run("import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()").has_finished


@both_locks
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("assert 1 + 1 == 3", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit", "left before its last line"),
        ("import sys\nsys.exit(0)", "left before its last line"),
        ("import os\nos._exit(0)", "left before its last line"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL|refuses os.kill"),
        ("import os\nos.kill(os.getpid(), 40)", "was killed by signal 40|refuses os.kill"),
        ("input()", "EOFError"),
    ],
)
def test_a_program_that_does_not_reach_its_last_line_has_not_finished(program, reason, use_kernel):
    outcome = run(f"{program}\n", use_kernel=use_kernel)
    assert not outcome.has_finished
    assert any(part in outcome.reason for part in reason.split("|"))


WRITES = {
    "open": "open(target, 'w')",
    "append": "open(target, 'a').write('x')",
    "os.open": "import os\nos.open(target, os.O_WRONLY | os.O_TRUNC)",
    "new file": "open(target + '.new', 'x')",
    "remove": "import os\nos.remove(target)",
    "rename away": "import os\nos.rename(target, target + '.new')",
    "rename here": "import os\nos.rename(target, 'mine')",
    "rename over": "import os\nopen('mine', 'w').close()\nos.replace('mine', target)",
    "link": "import os\nos.link(target, 'mine')\nopen('mine', 'w')",
    "symlink": "import os\nos.symlink(target, 'mine')\nopen('mine', 'w')",
    "truncate": "import os\nos.truncate(target, 0)",
    "chmod": "import os\nos.chmod(target, 0)",
    "chown": "import os\nos.chown(target, 1, 1)",
    "utime": "import os\nos.utime(target, (0, 0))",
    "attribute": "import os\nos.setxattr(target, 'user.a', b'x')",
    "shutil": "import shutil\nopen('mine', 'w').close()\nshutil.copy('mine', target)",
    "rmtree": "import os, shutil\nshutil.rmtree(os.path.dirname(target))",
    "mkdir": "import os\nos.mkdir(target + '.new')",
    "subprocess": "import subprocess\nsubprocess.run(['touch', target + '.new'], check=True)",
    "shell": "import os\nassert os.system(f'rm {target}') == 0",
    "exec": "import os\nos.execv('/bin/rm', ['rm', target])",
    "dir_fd": "import os\nfd = os.open(os.path.dirname(target), os.O_RDONLY)\n"
    "os.open(os.path.basename(target), os.O_WRONLY | os.O_TRUNC, dir_fd=fd)",
    "chdir": "import os\nos.chdir(os.path.dirname(target))\nopen(os.path.basename(target), 'w')",
    "parent folder": "open('../precious.txt', 'x')",
    "ctypes": "import ctypes\nassert ctypes.CDLL(None).open(target.encode(), 1025) >= 0",
    "ctypes unlink": "import ctypes\nassert ctypes.CDLL(None).unlink(target.encode()) == 0",
    "system call": "import ctypes\nassert ctypes.CDLL(None).syscall(2, target.encode(), 513) >= 0",
}


@both_locks
@pytest.mark.parametrize("program", WRITES.values(), ids=WRITES)
def test_nothing_outside_the_folder_is_written(program, use_kernel, target):
    before = os.stat(target)
    outcome = run(f"target = {str(target)!r}\n{program}\n", SHORT, use_kernel)
    after = os.stat(target)
    assert not outcome.has_finished
    assert target.read_text() == "precious" and os.listdir(target.parent) == [target.name]
    assert [before[:7], before.st_mtime_ns] == [after[:7], after.st_mtime_ns]  # all but the time it was read
    assert not (Path(target).parents[1] / "precious.txt").exists()


@both_locks
@pytest.mark.parametrize("kind", ["tcp", "udp", "unix", "bind", "pair", "urllib"])
def test_no_socket_is_opened(kind, use_kernel, tmp_path):
    with socket.socket() as server, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as local:
        server.bind(("127.0.0.1", 0))
        server.listen()
        local.bind(str(tmp_path / "s"))
        local.listen()
        port = server.getsockname()[1]
        program = {
            "tcp": f"import socket\nsocket.create_connection(('127.0.0.1', {port}))",
            "udp": f"import socket\nsocket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
            "unix": f"import socket\nsocket.socket(socket.AF_UNIX).connect({str(tmp_path / 's')!r})",
            "bind": "import socket\nsocket.socket().bind(('127.0.0.1', 0))",
            "pair": "import socket\nsocket.socketpair()",
            "urllib": f"import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{port}', timeout=1)",
        }[kind]
        outcome = run(program, SHORT, use_kernel)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert not outcome.has_finished


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time\ntime.sleep(1000)",
        "import signal, time\nfor s in (2, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(1000)",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\ntime.sleep(1000)",
    ],
)
def test_an_endless_program_is_stopped(program):
    assert run(program, ResourceLimits(seconds=0.5)).reason == "ran longer than 0.5 seconds"


def test_processor_time_is_limited():
    assert run("while True: pass", ResourceLimits(seconds=60, cpu_seconds=1)).reason.startswith("was killed by SIG")


@both_locks
def test_a_fork_bomb_cannot_fork(use_kernel):
    attempts = "for _ in range(1000):\n    try: os.fork()\n    except Exception: pass\n    else: print('forked')"
    outcome = run(f"import os\n{attempts}\n", SHORT, use_kernel)
    assert outcome.has_finished and not outcome.output
    popen = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'input()'])"
    assert run(popen, SHORT, use_kernel).reason.startswith("PermissionError")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("while True: print('x' * 1000)", "OSError: [Errno 27] File too large"),
        ("'a' * 10**12", "MemoryError"),
        ("x = []\nwhile True: x.append(bytearray(2**20))", "MemoryError"),
        ("import mmap\nmmap.mmap(-1, 2**30)", "OSError: [Errno 12]"),
        ("x = open('x', 'wb')\nwhile True: x.write(bytes(2**16))", "OSError: [Errno 27] File too large"),
        ("for n in range(10**6): open(f'{n}', 'wb').write(bytes(2**19))", "wrote more"),
        ("for n in range(10**6): open(f'{n}', 'wb').close()", "wrote more"),
        ("x = []\nwhile True: x.append(open('x', 'w'))", "OSError: [Errno 24] Too many open files"),
        ("def f(): f()\nf()", "RecursionError"),
        ("import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "ValueError: not allowed"),
        ("class E(Exception):\n    def __str__(self): return 1\nraise E", "an exception that cannot be printed"),
    ],
)
def test_the_resources_of_a_program_are_limited(program, reason):
    outcome = run(program, SHORT)
    assert not outcome.has_finished and outcome.reason.startswith(reason), outcome
    assert len(outcome.output) <= SHORT.output_chars


@both_locks
@pytest.mark.parametrize(
    "program",
    [
        "import os\nos.kill(os.getppid(), 9)",
        "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)",
        "import os\nos.killpg(os.getpgid(os.getppid()), 9)",
        "import os\nos.kill(-1, 9)",
        "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))",
        "import os, ctypes\nassert ctypes.CDLL(None).kill(os.getppid(), 9) == 0",
        "import os, ctypes\nassert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0",
        "import os\nassert os.pidfd_open(os.getppid())",
    ],
)
def test_other_processes_cannot_be_reached(program, use_kernel):
    if sys.platform != "linux" and "resource" in program:
        pytest.skip("prlimit is Linux's")
    if not use_kernel and "pidfd" in program:
        pytest.skip("no audit event tells of it, and alone it does nothing")
    assert not run(program, SHORT, use_kernel).has_finished
    assert os.getpid()


@both_locks
def test_secrets_cannot_be_read(use_kernel, target, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "hunter2")
    places = [
        str(target),
        f"/proc/{os.getpid()}/environ",
        "/proc/1/environ",
        str(Path.home() / ".bashrc"),
        "/etc/passwd",
    ]
    program = (
        "import os\nprint(dict(os.environ))\n"
        f"for place in {places!r}:\n    try: print(open(place, 'rb').read())\n    except OSError: print('closed')\n"
        "try: print(os.listdir(os.path.expanduser('~/..')))\nexcept OSError: print('closed')\n"
    )
    outcome = run(program, use_kernel=use_kernel)
    assert outcome.has_finished
    assert outcome.output.count("closed") == len(places) + 1
    assert "hunter2" not in outcome.output and "precious" not in outcome.output


@kernel_only
@pytest.mark.skipif(os.geteuid() != 0, reason="only root has privileges to give up")
@pytest.mark.parametrize(
    "call", ["os.setuid(1)", "os.setgroups([])", "os.nice(-5)", "os.chroot('.')", "os.mkfifo('x')"]
)
def test_root_has_no_privileges_in_the_sandbox(call):
    outcome = run(f"import os\n{call}\n")
    assert "PermissionError" in outcome.reason


@kernel_only
def test_native_code_cannot_start_a_process():
    program = "import ctypes\nlibc = ctypes.CDLL(None)\nassert libc.fork() == libc.vfork() == -1\n"
    program += "assert libc.system(b'true') != 0 and libc.memfd_create(b'x', 0) == -1 and libc.shmget(0, 9, 512) == -1"
    assert run(program).has_finished


def test_neither_files_nor_processes_remain(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    started = time.monotonic()
    assert not run("open('a', 'w').write('a')\nimport time\ntime.sleep(1000)", ResourceLimits(seconds=0.5)).has_finished
    assert time.monotonic() - started < 100
    assert os.listdir(tmp_path) == []


def test_the_outcome_names_the_locks_that_were_used():
    assert run("", use_kernel=False).locks == ("hook",)
    assert set(LOCKS) in ({"landlock", "seccomp"}, {"landlock", "hook"}, {"seccomp", "hook"}, {"hook"})


def test_output_is_truncated_and_need_not_be_text():
    outcome = run("import os\nos.write(1, bytes(range(256)) * 100)", ResourceLimits(output_chars=300))
    assert outcome.has_finished and len(outcome.output) == 300
