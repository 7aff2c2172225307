"""Programs that a model wrote, run where they can do little harm.

A program runs in a fresh process of the same Python (``-I``), with a scrubbed environment, an empty flat folder of its
own as working folder and home, and limits on time, memory, files and output. On Linux the kernel itself keeps it in:
Landlock (from 6.2) lets it write in its folder alone and read little but Python and system libraries; seccomp (x86_64,
aarch64) refuses new processes, sockets, signals to others, and changes of modes and owners. Where one of them is
missing, as on macOS, an audit hook of Python refuses the same: `Outcome.locks` says so, and native code could get
around it.

This is no container and no virtual machine: the kernel and the processor are shared, a hole in the kernel is a hole
here, and a program bent on it can find in its own memory the token that proves its end. For code that is meant to
attack, use a virtual machine.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

JAIL = Path(__file__).with_name("jail.py")
MAX_FILES = 1000


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Args:
        seconds: Wall time.
        cpu_seconds: Time on the processor.
        memory_bytes: Address space.
        file_bytes: One file, its output among them.
        folder_bytes: All files together.
        open_files: Files open at once.
        output_chars: Output that is kept.
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
        has_finished: Whether it ran to its last line without an exception; leaving earlier, by any door, is not that.
        reason: ``finished``, or why it is not.
        output: What it printed, cut.
        locks: What kept it in: ``landlock``, ``seccomp``, ``hook``.
    """

    has_finished: bool
    reason: str
    output: str
    locks: tuple[str, ...]


def run(program: str, limits: Limits | None = None, use_kernel: bool = True) -> Outcome:
    """Run a Python program in the sandbox and wait for its end.

    Args:
        program: Its text.
        limits: What it may use.
        use_kernel: Use Landlock and seccomp where the kernel has them; False leaves the audit hook alone, as on macOS.

    Raises:
        ValueError: This system has no resource limits (Windows).
    """
    if os.name != "posix":
        raise ValueError("running code needs the resource limits of Linux or macOS; leave out --allow-code-execution")
    limits = limits or Limits()
    token = secrets.token_hex(16)
    order = {"program": program, "token": token, "limits": asdict(limits), "use_kernel": use_kernel}
    with (
        tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as printed,
        tempfile.TemporaryFile() as verdict,
    ):
        given.write(json.dumps(order).encode())
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-X", "utf8", str(JAIL), str(verdict.fileno())],
            stdin=given,
            stdout=printed,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={
                "HOME": folder,
                "TMPDIR": folder,
                "LANG": "C.UTF-8",
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
            pass_fds=(verdict.fileno(),),
            start_new_session=True,
        )
        try:
            stopped = _wait(process, folder, limits)
        finally:
            _kill(process)
        first, _, end = _read(verdict, 1000).partition("\n")
        output = _read(printed, limits.output_chars)
        has_finished = not stopped and end == token
        if not stopped and process.returncode < 0:
            stopped = f"was killed by {signal.Signals(-process.returncode).name}"
        reason = "finished" if has_finished else stopped or end.strip() or "left before its last line"
        return Outcome(has_finished, reason, output, tuple(first.split()))


def _wait(process: subprocess.Popen, folder: str, limits: Limits) -> str:
    """Wait for the end, or say why to end it."""
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


def _kill(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()


def _size(entry: os.DirEntry) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_blocks * 512
    except OSError:
        return 0


def _read(file, most: int) -> str:
    """The file's beginning; it is the program's too, which may have moved in it or written what is no text."""
    file.seek(0)
    return file.read(most).decode(errors="replace")
