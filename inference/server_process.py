"""Runs a server as a process of its own that always ends with this one, and reads what it counts."""

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from data.safe_text import safe_line

START_SECONDS = 1800.0  # for downloading and loading a large base
GRACE_SECONDS = 20.0  # between SIGTERM and SIGKILL
COUNTER = re.compile(
    r"(?:vllm|llamacpp):spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)_total"
)
FAULT = re.compile(r"\b\w*(?:Error|Exception): .+|error: .+")
FOLLOW_UP = re.compile(r"(Engine core|WorkerProc) initialization failed")  # another process of vLLM has shown the cause

Counts = dict[str, int]  # the counters of speculation by name; that of a position ends with its number


@contextmanager
def running_server(
    name: str,
    command: str | Sequence[str],
    log: Path,
    is_ready: Callable[[], object],
    environment: Mapping[str, str] = os.environ,
    seconds: float = START_SECONDS,
) -> Iterator[None]:
    """Run a server until the block ends, which begins once the server is ready.

    The command is a line of the shell, or a list of words. Raises ValueError, which quotes an error of its log, if the
    server ends before it is ready, or is not ready after so many seconds.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            shell=isinstance(command, str),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C of the terminal reaches this process alone, which ends the server
            preexec_fn=partial(ctypes.CDLL(None).prctl, 1, signal.SIGTERM) if sys.platform == "linux" else None,
        )  # prctl(PR_SET_PDEATHSIG, SIGTERM), should this process be killed
    deadline = time.monotonic() + seconds
    try:
        while not is_ready():
            if process.poll() is not None:
                faults = FAULT.findall(log.read_text(encoding="utf-8", errors="replace"))
                cause = next((fault for fault in faults[::-1] if not FOLLOW_UP.search(fault)), "it names no error")
                raise ValueError(f"{name} ended with code {process.returncode}: {safe_line(cause)[:300]}; see {log}")
            if time.monotonic() > deadline:
                raise ValueError(f"{name} was not ready after {seconds:g} seconds; see {log}")
            time.sleep(0.5)
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)


def free_port() -> int:
    """A port that no process listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def read_counts(text: str) -> Counts | None:
    """Read the counters of speculation of vLLM, added up over its engines, or of llama.cpp; None if there are none."""
    counts: Counts = {}
    for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
        if match := COUNTER.fullmatch(sample.name):
            name = match[1] + sample.labels.get("position", "").rjust(4, "0") * ("position" in sample.labels)
            counts[name] = counts.get(name, 0) + int(sample.value)
    return counts or None
