"""Starts vLLM's server as a process, measures the CPU time of all its processes, and always ends them."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from data.files import safe_line
from inference.evaluation.served.client import ServerClient, ServerError
from inference.vllm.command import Launch

START_SECONDS = 1800.0  # for downloading and loading a large base
POLLING_SECONDS = 0.5
GRACE_SECONDS = 20.0  # between SIGTERM and SIGKILL
MAX_LOG_BYTES = 1 << 16  # of the end of the log, in which the error is looked for
# Only this machine reaches the server. Without prefix caching a prompt costs the same the second time.
OPTIONS = ["--host", "127.0.0.1", "--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
# Otherwise vLLM applies the base's own repetition penalty and length, and greedy decoding would not be greedy.
OPTIONS += ["--generation-config", "vllm"]
KEY = "VLLM_API_KEY"  # with which vLLM would demand a key from its clients
FAULT = re.compile(r"\b\w*(?:Error|Exception): .+|error: .+")
FOLLOW_UP = "Engine core initialization failed"  # vLLM's own error after another process has shown the cause
END_WITH_PARENT = 1, signal.SIGTERM  # prctl(PR_SET_PDEATHSIG, SIGTERM), should this process be killed


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def running(launch: Launch, port: int, more: Sequence[str], log: Path) -> Iterator[tuple[ServerClient, int]]:
    """Run a server; yield its client, once it is healthy, and the id of its session of processes.

    Args:
        launch: How it is started.
        port: Its port.
        more: Further arguments of vLLM.
        log: File for its output.

    Raises:
        ServerError: It ends before it is healthy; the message quotes the error in its log.
    """
    arguments = [sys.executable, *launch.arguments, *OPTIONS, *more]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            arguments,
            env={name: value for name, value in os.environ.items() if name != KEY} | launch.environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C of the terminal reaches this process alone, which ends the server
            preexec_fn=partial(ctypes.CDLL(None).prctl, *END_WITH_PARENT) if sys.platform == "linux" else None,
        )
    client = ServerClient(f"http://127.0.0.1:{port}", uses_proxy=False)
    try:
        _wait(process, client, log)
        yield client, process.pid
    finally:
        client.close()
        _end(process)


def cpu_seconds(session: int) -> float | None:
    """CPU seconds of all processes of a session, with those of their children that have ended; None off Linux."""
    if not Path("/proc/self/stat").exists():
        return None
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):  # a process that has ended meanwhile
            fields = path.read_text().rpartition(")")[2].split()  # behind the name, which may hold anything
            if int(fields[3]) == session:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _wait(process: subprocess.Popen, client: ServerClient, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not client.is_healthy():
        if process.poll() is not None:
            raise ServerError(f"vLLM ended with exit code {process.returncode}: {_fault(log)}")
        if time.monotonic() > deadline:
            raise ServerError(f"vLLM was not ready after {START_SECONDS:g} seconds")
        time.sleep(POLLING_SECONDS)


def _fault(log: Path) -> str:
    """The error in a log that explains best why the server ended."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - MAX_LOG_BYTES))
        faults = FAULT.findall(stream.read().decode("utf-8", "replace"))
    causes = [fault for fault in faults if FOLLOW_UP not in fault] or ["it names no error"]
    return safe_line(causes[-1])[:300]


def _end(process: subprocess.Popen) -> None:
    """End a server with all its processes."""
    for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, GRACE_SECONDS)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
