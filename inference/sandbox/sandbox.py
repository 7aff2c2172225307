"""Runs programs that a model wrote where they can do little harm.

A program runs in a fresh process of the same Python (``-I -S``), with an almost empty environment, an empty folder as
its working directory and home, and limits on time, memory, files and output. On Linux the kernel isolates it: Landlock
(Linux 6.2 or later) lets it write only to its folder and read little more than Python and system libraries; seccomp
(x86_64, aarch64) refuses new processes, sockets, signals to other processes, and changes of file modes and owners. If
one of them is missing, as on macOS, a Python audit hook refuses the same operations; native code could get around it.
`Outcome.locks` says which of them were used.

This is neither a container nor a virtual machine. The program shares the kernel and the processor with everything else,
so that a bug in the kernel lets it escape, and it can find in its own memory the token that proves that it finished.
Use a virtual machine for code that is written to attack.
"""

from __future__ import annotations

import marshal
import os
import secrets
import signal
import site
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

JAIL = Path(__file__).with_name("jail.py")
MAX_FILES = 1000
SYSTEM = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/urandom", "/dev/random", "/dev/zero")
READABLE = (sys.prefix, sys.base_prefix, sys.exec_prefix, *SYSTEM, *DEVICES)


@dataclass(frozen=True)
class ResourceLimits:
    """The resources that a program may use.

    Args:
        seconds: Wall time in seconds.
        cpu_seconds: Processor time in seconds.
        memory_bytes: Size of the address space in bytes.
        file_bytes: Size of one file in bytes; the output counts as a file.
        folder_bytes: Size of all files together in bytes.
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
        locks: What isolated the program: ``landlock``, ``seccomp``, ``hook``.
    """

    has_finished: bool
    reason: str
    output: str
    locks: tuple[str, ...]


def run(program: str, limits: ResourceLimits | None = None, use_kernel: bool = True) -> Outcome:
    """Run a Python program in the sandbox and wait for its end.

    Args:
        program: Text of the program.
        limits: The resources that it may use.
        use_kernel: Whether to use Landlock and seccomp if the kernel has them; False uses only the audit hook, as on
            macOS.

    Raises:
        ValueError: The operating system has no resource limits (Windows).
    """
    if os.name != "posix":
        raise ValueError("running code needs the resource limits of Linux or macOS; leave out --allow-code-execution")
    limits = limits or ResourceLimits()
    token = secrets.token_hex(16)
    order = {"program": program, "token": token, "limits": asdict(limits), "use_kernel": use_kernel}
    order |= {"readable": READABLE, "packages": site.getsitepackages()}
    with (
        tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as order_file,
        tempfile.TemporaryFile() as output_file,
        tempfile.TemporaryFile() as report_file,
    ):
        order_file.write(marshal.dumps(order))
        order_file.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(JAIL), str(report_file.fileno())],
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
            pass_fds=(report_file.fileno(),),
            start_new_session=True,
        )
        try:
            stopped = _wait(process, folder, limits)
        finally:
            _kill(process)
        first, _, end = _read(report_file, 1000).partition("\n")
        output = _read(output_file, limits.output_chars)
        has_finished = not stopped and end == token
        if not stopped and process.returncode < 0:
            stopped = f"was killed by {_signal_name(-process.returncode)}"
        reason = "finished" if has_finished else stopped or end.strip() or "left before its last line"
        return Outcome(has_finished, reason, output, tuple(first.split()))


def _wait(process: subprocess.Popen[bytes], folder: str, limits: ResourceLimits) -> str:
    """Wait for the process; return why it must be stopped, or nothing if it ended by itself."""
    deadline = time.monotonic() + limits.seconds
    while time.monotonic() < deadline:
        try:
            process.wait(0.02)
            return ""
        except subprocess.TimeoutExpired:
            sizes = [_size(entry) for entry in os.scandir(folder)]
            if sum(sizes) > limits.folder_bytes or len(sizes) > MAX_FILES:
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


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_blocks * 512
    except OSError:
        return 0


def _read(file: IO[bytes], num_bytes: int) -> str:
    """Read the beginning of a file that the program could write to: it may have moved in it, or written other bytes."""
    file.seek(0)
    return file.read(num_bytes).decode(errors="replace")
