"""Hostile programs in the sandbox, with each isolation that works on this machine."""

import ctypes
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import get_args

import pytest

from inference.sandbox.sandbox import WEAK, Isolation, ResourceLimits, choose_isolation, held_locks, run

SHORT = ResourceLimits(seconds=8, cpu_seconds=4, memory_bytes=2**28, file_bytes=2**20, folder_bytes=2**22)
ISOLATIONS = [isolation for isolation in get_args(Isolation) if held_locks(isolation)]
STRONG = [isolation for isolation in ISOLATIONS if isolation not in WEAK]
if STRONG:
    ISOLATIONS.remove("seccomp")  # a part of the others
BEST = choose_isolation(allow_weak=True)
every_isolation = pytest.mark.parametrize("isolation", ISOLATIONS)
every_strong_isolation = pytest.mark.parametrize("isolation", STRONG)


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "precious.txt"
    path.write_text("precious")
    return path


@every_isolation
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
def test_a_harmless_program_finishes(program, isolation):
    outcome = run(program, isolation=isolation)
    assert outcome.has_finished and outcome.reason == "finished", outcome


def test_threads_are_allowed():
    assert run("import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()", isolation=BEST).has_finished


@every_isolation
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
def test_a_program_that_does_not_reach_its_last_line_has_not_finished(program, reason, isolation):
    outcome = run(f"{program}\n", isolation=isolation)
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


@every_isolation
@pytest.mark.parametrize("program", WRITES.values(), ids=WRITES)
def test_nothing_outside_the_folder_is_written(program, isolation, target):
    before = os.stat(target)
    outcome = run(f"target = {str(target)!r}\n{program}\n", SHORT, isolation)
    after = os.stat(target)
    assert not outcome.has_finished
    assert target.read_text() == "precious" and os.listdir(target.parent) == [target.name]
    assert [before[:7], before.st_mtime_ns] == [after[:7], after.st_mtime_ns]  # all but the time it was read
    assert not (Path(target).parents[1] / "precious.txt").exists()


@every_isolation
@pytest.mark.parametrize("kind", ["tcp", "udp", "unix", "bind", "pair", "urllib"])
def test_no_socket_is_opened(kind, isolation, tmp_path):
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
        outcome = run(program, SHORT, isolation)
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
    assert run(program, ResourceLimits(seconds=0.5), BEST).reason == "ran longer than 0.5 seconds"


def test_processor_time_is_limited():
    limits = ResourceLimits(seconds=60, cpu_seconds=1)
    assert run("while True: pass", limits, BEST).reason.startswith("was killed by SIG")


@every_isolation
def test_a_fork_bomb_cannot_fork(isolation):
    attempts = "for _ in range(1000):\n    try: os.fork()\n    except Exception: pass\n    else: print('forked')"
    outcome = run(f"import os\n{attempts}\n", SHORT, isolation)
    assert outcome.has_finished and not outcome.output
    popen = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'input()'])"
    assert run(popen, SHORT, isolation).reason.startswith("PermissionError")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("while True: print('x' * 1000)", "OSError: [Errno 27] File too large"),
        ("'a' * 10**12", "MemoryError"),
        ("x = []\nwhile True: x.append(bytearray(2**20))", "MemoryError"),
        ("import mmap\nmmap.mmap(-1, 2**30)", "OSError: [Errno 12]"),
        ("x = open('x', 'wb')\nwhile True: x.write(bytes(2**16))", "OSError: [Errno 27] File too large"),
        ("x = []\nwhile True: x.append(open('x', 'w'))", "OSError: [Errno 24] Too many open files"),
        ("def f(): f()\nf()", "RecursionError"),
        ("import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "ValueError: not allowed"),
        ("class E(Exception):\n    def __str__(self): return 1\nraise E", "an exception that cannot be printed"),
    ],
)
def test_the_resources_of_a_program_are_limited(program, reason):
    outcome = run(program, SHORT, BEST)
    assert not outcome.has_finished and outcome.reason.startswith(reason), outcome
    assert len(outcome.output) <= SHORT.output_chars


@every_isolation
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
    ],
)
def test_other_processes_cannot_be_reached(program, isolation):
    assert not run(program, SHORT, isolation).has_finished
    assert os.getpid()


@every_strong_isolation  # no audit event tells of it, and alone it does nothing
def test_no_handle_of_another_process_is_opened(isolation):
    assert run("import os\nos.pidfd_open(os.getppid())", isolation=isolation).reason.startswith("PermissionError")


@every_isolation
def test_secrets_cannot_be_read(isolation, target, monkeypatch):
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
    outcome = run(program, isolation=isolation)
    assert outcome.has_finished
    assert outcome.output.count("closed") == len(places) + 1
    assert "hunter2" not in outcome.output and "precious" not in outcome.output


@every_strong_isolation
@pytest.mark.parametrize(
    "call", ["os.setuid(1)", "os.setgroups([])", "os.nice(-5)", "os.chroot('.')", "os.mkfifo('x')"]
)
def test_even_root_has_no_privileges_in_the_sandbox(call, isolation):
    outcome = run(f"import os\n{call}\n", isolation=isolation)
    assert outcome.reason.startswith(("PermissionError", "OSError: [Errno 22]"))  # bubblewrap knows no other user


@every_strong_isolation
def test_native_code_cannot_start_a_process(isolation):
    program = "import ctypes\nlibc = ctypes.CDLL(None)\nassert libc.fork() == libc.vfork() == -1\n"
    program += "assert libc.system(b'true') != 0 and libc.memfd_create(b'x', 0) == -1 and libc.shmget(0, 9, 512) == -1"
    assert run(program, isolation=isolation).has_finished


def test_neither_files_nor_processes_remain(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    started = time.monotonic()
    program = "open('a', 'w').write('a')\nimport time\ntime.sleep(1000)"
    assert not run(program, ResourceLimits(seconds=0.5), BEST).has_finished
    assert time.monotonic() - started < 100
    assert os.listdir(tmp_path) == []


@pytest.fixture
def shared_objects():
    """System V memory, a semaphore and a queue, and a POSIX queue: the calls by which a program would reach them."""
    libc = ctypes.CDLL(None, use_errno=True)
    name = f"/sandbox-{os.getpid()}".encode()
    memory, semaphore, queue = libc.shmget(0, 4096, 0o600), libc.semget(0, 1, 0o600), libc.msgget(0, 0o600)
    posix_queue = libc.mq_open(name, os.O_CREAT | os.O_RDWR, 0o600, None)
    assert min(memory, semaphore, queue, posix_queue) >= 0, os.strerror(ctypes.get_errno())
    yield {
        "memory": f"libc.shmat({memory}, None, 0)",
        "semaphore": f"libc.semctl({semaphore}, 0, 16, 7)",  # SETVAL
        "queue": f"libc.msgsnd({queue}, ctypes.create_string_buffer(b'1', 16), 8, 0o4000)",
        "POSIX queue": f"libc.mq_unlink({name!r})",
    }
    libc.shmctl(memory, 0, None), libc.semctl(semaphore, 0, 0), libc.msgctl(queue, 0, None), libc.mq_unlink(name)
    os.close(posix_queue)


@every_strong_isolation
def test_shared_objects_of_the_same_user_cannot_be_reached(isolation, shared_objects):
    calls = "".join(f"if {call} != -1: reached.append({name!r})\n" for name, call in shared_objects.items())
    program = f"import ctypes\nlibc = ctypes.CDLL(None)\nlibc.shmat.restype = ctypes.c_long\nreached = []\n{calls}"
    outcome = run(f"{program}assert not reached, reached\n", isolation=isolation)
    assert outcome.has_finished, outcome


@every_isolation
def test_the_kernel_sends_no_signals_for_a_program(isolation):
    with subprocess.Popen(["sleep", "60"]) as target:
        program = f"""
import fcntl, os, time
read, write = os.pipe()
fcntl.fcntl(read, fcntl.F_SETOWN, {target.pid})
fcntl.fcntl(read, 10, 9)  # F_SETSIG
fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC)
os.write(write, b"x")
time.sleep(0.2)
"""
        outcome = run(program, isolation=isolation)
        assert target.poll() is None
        target.kill()
    assert outcome.reason.startswith("PermissionError"), outcome


MUCH = {
    "files": "for n in range(10**6): open(f'{n}', 'wb').write(bytes(2**19))",
    "empty files": "for n in range(10**6): open(f'{n}', 'wb').close()",
    "deleted files": """
import os, time
files = []
for n in range(30):
    files.append(open("a", "wb"))
    os.unlink("a")
    files[-1].write(bytes(2**20))
time.sleep(1)
""",
}
MUCH_BY_NATIVE_CODE = {
    "mapped deleted files": """
import mmap, os
maps = []
for n in range(30):
    file = open("a", "w+b")
    os.unlink("a")
    file.truncate(2**20)
    maps.append(mmap.mmap(file.fileno(), 2**20))
    maps[-1][:] = bytes(2**20)
""",
    "preallocated output": """
import ctypes
KEEP_SIZE = 1
assert ctypes.CDLL(None).fallocate(1, KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(2**25)) == 0
""",
}


@every_isolation
@pytest.mark.parametrize("program", MUCH.values(), ids=MUCH)
def test_all_files_together_are_limited(program, isolation):
    outcome = run(program, SHORT, isolation)
    assert outcome.reason.startswith(("wrote more", "OSError: [Errno 28] No space left")), outcome


@every_strong_isolation
@pytest.mark.parametrize("program", MUCH_BY_NATIVE_CODE.values(), ids=MUCH_BY_NATIVE_CODE)
def test_what_is_written_past_the_file_system_calls_is_limited(program, isolation):
    outcome = run(program, SHORT, isolation)
    assert not outcome.has_finished
    assert outcome.reason.startswith(("PermissionError", "AssertionError")), outcome


@every_isolation
def test_a_program_cannot_change_which_locks_are_reported(isolation):
    program = "import os\nfor number in range(3, 64):\n    try: os.pwrite(number, b'none at all', 0)\n"
    assert run(f"{program}    except OSError: pass\n", isolation=isolation).locks == held_locks(isolation)


def test_the_outcome_names_the_locks_that_were_used():
    assert held_locks("hook") == ("hook",)
    for isolation in ISOLATIONS:
        assert isolation in held_locks(isolation)


@pytest.fixture
def broken_bubblewrap(tmp_path, monkeypatch):
    """A bwrap that fails, as where user namespaces are forbidden."""
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    held_locks.cache_clear()
    yield
    held_locks.cache_clear()


def test_a_bubblewrap_that_does_not_work_is_not_chosen(broken_bubblewrap):
    with pytest.raises(ValueError, match="was not run: bwrap: setting up uid map: Permission denied"):
        run("", isolation="bubblewrap")
    assert choose_isolation(allow_weak=True) == next(i for i in ("landlock", "seccomp", "hook") if held_locks(i))


def test_output_is_truncated_and_need_not_be_text():
    outcome = run("import os\nos.write(1, bytes(range(256)) * 100)", ResourceLimits(output_chars=300), BEST)
    assert outcome.has_finished and len(outcome.output) == 300
