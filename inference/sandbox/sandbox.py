"""Runs programs that a model wrote where they can do little harm.

A program runs in a fresh process of the same Python (``-I -S``), with an almost empty environment, an empty folder as
its working directory and home, and limits on time, memory, files and output. There are four kinds of isolation:

- ``bubblewrap``, where ``bwrap`` is installed and works: namespaces of its own for processes, users, network, System V
  and POSIX objects, a read-only root that holds little more than Python and system libraries, and a folder in memory.
  The locks of the kernel that follow hold in it too.
- ``landlock`` (Linux 6.2 or later): the kernel lets the program write only to its folder and read as little; seccomp
  (x86_64, aarch64) refuses new processes, sockets, signals to other processes, shared objects, and changes of file
  modes and owners.
- ``seccomp``: only that, and a Python audit hook refuses access to files. Native code, and some of Python's own, get
  around the hook.
- ``hook``: the audit hook alone, as on macOS.

The last two are weak, and chosen only if that is allowed. `Outcome.locks` says what held.

No kind is a virtual machine. The program shares the kernel and the processor with everything else, so that a bug in the
kernel lets it escape, and it can find in its own memory the token that proves that it finished. Use a virtual machine
for code that is written to attack.
"""

from __future__ import annotations

import marshal
import os
import secrets
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO, Literal, get_args

from inference.sandbox import bubblewrap

JAIL = Path(__file__).with_name("jail.py")
MAX_FILES = 1000
SYSTEM = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/urandom", "/dev/random", "/dev/zero")
READABLE = (sys.prefix, sys.base_prefix, sys.exec_prefix, *SYSTEM, *DEVICES)

Isolation = Literal["bubblewrap", "landlock", "seccomp", "hook"]
WEAK = ("seccomp", "hook")


@dataclass(frozen=True)
class ResourceLimits:
    """The resources that a program may use.

    Args:
        seconds: Wall time in seconds.
        cpu_seconds: Processor time in seconds.
        memory_bytes: Size of the address space in bytes.
        file_bytes: Size of one file in bytes; the output counts as a file.
        folder_bytes: Size of all files together in bytes, deleted ones that are still open included. Without bubblewrap
            it also limits all that the program ever writes.
        open_files: Number of files that are open at the same time.
        output_chars: Number of characters of the output that are kept.
    """

    seconds: float = 10.0
    cpu_seconds: int = 10
    memory_bytes: int = 2**30
    file_bytes: int = 2**24
    folder_bytes: int = 2**26
    open_files: int = 64
    output_chars: int = 4000


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Args:
        has_finished: Whether the program ran to its last line without an exception and without exiting before it.
        reason: ``finished``, or why the program did not finish.
        output: The beginning of what the program printed.
        locks: What isolated the program: ``bubblewrap``, ``landlock``, ``seccomp``, ``hook``.
    """

    has_finished: bool
    reason: str
    output: str
    locks: tuple[str, ...]


def choose_isolation(allow_weak: bool = False) -> Isolation:
    """Return the strongest isolation that works on this machine.

    Args:
        allow_weak: Accept an isolation that hostile programs can get around, if there is no other.

    Raises:
        ValueError: There is none, or only a weak one.
    """
    if os.name != "posix":
        raise ValueError("running code needs the resource limits of Linux or macOS; leave out --allow-code-execution")
    for isolation in get_args(Isolation):
        if (allow_weak or isolation not in WEAK) and held_locks(isolation):
            return isolation
    raise ValueError(
        "the programs in the answers were not run: neither bubblewrap nor Landlock works here to isolate them; install "
        "bubblewrap, use Linux 6.2 or later, or accept a sandbox that hostile programs get around: --allow-weak-sandbox"
    )


@cache
def held_locks(isolation: Isolation) -> tuple[str, ...]:
    """What isolates a program, found by running one: see `Outcome.locks`; empty if the isolation does not work here."""
    if isolation == "bubblewrap" and not shutil.which("bwrap"):
        return ()
    try:
        outcome = run("import time\ntime.sleep(0.05)", isolation=isolation)  # until its files were counted once
    except ValueError:
        return ()
    return outcome.locks if outcome.has_finished else ()


def run(program: str, limits: ResourceLimits | None = None, isolation: Isolation | None = None) -> Outcome:
    """Run a Python program in the sandbox and wait for its end.

    Args:
        program: Text of the program.
        limits: The resources that it may use.
        isolation: What isolates it; by default `choose_isolation()`.

    Raises:
        ValueError: The isolation does not work here, so the program was not run.
    """
    isolation, limits = isolation or choose_isolation(), limits or ResourceLimits()
    is_wrapped = isolation == "bubblewrap"
    token = secrets.token_hex(16)
    order = {"program": program, "token": token, "isolation": isolation, "limits": asdict(limits)}
    order |= {"readable": READABLE, "packages": site.getsitepackages()}
    reader, writer = os.pipe()  # unlike a file, it keeps what the jail writes first, whatever the program does to it
    with (
        open(reader, "rb", buffering=0) as report,
        open(writer, "wb", buffering=0),
        tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as order_file,
        tempfile.TemporaryFile() as output_file,
        tempfile.TemporaryFile() as info_file,
    ):
        order_file.write(marshal.dumps(order))
        order_file.seek(0)
        command = [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(JAIL), str(writer)]
        if is_wrapped:
            command = bubblewrap.wrap(command, [*READABLE, str(JAIL)], folder, limits.folder_bytes, info_file.fileno())
        process = subprocess.Popen(
            command,
            stdin=order_file,
            stdout=output_file,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={
                "HOME": folder,
                "TMPDIR": folder,
                "LANG": "C.UTF-8",
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
            pass_fds=(writer, info_file.fileno()) if is_wrapped else (writer,),
            start_new_session=True,
        )
        try:
            stopped = _wait(process, folder, limits, info_file if is_wrapped else None)
        finally:
            _kill(process)
        os.set_blocking(reader, False)
        locks, has_started, end = (report.read(1000) or b"").decode(errors="replace").partition("\n")
        output = _read(output_file, limits.output_chars)
    if not has_started and not stopped:
        raise ValueError(f"the sandbox did not start, so the program was not run: {output.strip()[-300:]}")
    has_finished = not stopped and end == token
    exit_code = 128 - process.returncode if is_wrapped else process.returncode  # bubblewrap counts like a shell
    if not stopped and exit_code < 0:
        stopped = f"was killed by {_signal_name(-exit_code)}"
    reason = "finished" if has_finished else stopped or end.strip() or "left before its last line"
    return Outcome(has_finished, reason, output, ("bubblewrap",) * is_wrapped + tuple(locks.split()))


def _wait(process: subprocess.Popen[bytes], folder: str, limits: ResourceLimits, info_file: IO[bytes] | None) -> str:
    """Wait for the process; return why it must be stopped, or nothing if it ended by itself.

    Args:
        process: The program's process, or bubblewrap's.
        folder: The program's working directory.
        limits: Its limits on time and files.
        info_file: What bubblewrap says of itself.
    """
    deadline = time.monotonic() + limits.seconds
    while time.monotonic() < deadline:
        try:
            process.wait(0.02)
            return ""
        except subprocess.TimeoutExpired:
            # bubblewrap limits the bytes, but not the number of empty files
            place = f"/proc/{bubblewrap.first_process(info_file)}/root{folder}" if info_file else folder
            try:
                sizes = [_size(entry) for entry in os.scandir(place)]
            except (FileNotFoundError, ProcessLookupError):  # bubblewrap has not started yet, or has just ended
                continue
            except PermissionError:
                return "could not be watched"
            num_bytes = sum(sizes) if info_file else max(sum(sizes), _num_written(process.pid))
            if num_bytes > limits.folder_bytes or len(sizes) > MAX_FILES:
                return f"wrote more than {limits.folder_bytes} bytes or {MAX_FILES} files"
    return f"ran longer than {limits.seconds:g} seconds"


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"


def _num_written(process_id: int) -> int:
    """How many bytes a process has ever written, to files that it has deleted too; 0 if the system does not say."""
    try:
        with open(f"/proc/{process_id}/io", encoding="ascii") as file:
            return int(dict(line.split(":") for line in file)["wchar"])
    except OSError:
        return 0


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_blocks * 512
    except OSError:
        return 0


def _read(file: IO[bytes], num_bytes: int) -> str:
    """Read the beginning of a file that the program could write to: it may have moved in it, or written other bytes."""
    file.seek(0)
    return file.read(num_bytes).decode(errors="replace")
