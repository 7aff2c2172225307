"""Runs vLLM as a process of its own that always ends with this one, and reads what it counts."""

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from data.safe_text import safe_line
from inference.vllm.command import Launch

START_SECONDS = 1800.0  # for downloading and loading a large base
GRACE_SECONDS = 20.0  # between SIGTERM and SIGKILL
COUNTER = re.compile(
    r"(?:vllm|llamacpp):spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)_total"
)
# Only this machine reaches vLLM. Without prefix caching a prompt costs the same the second time. With the base's own
# generation config (a repetition penalty, say) greedy decoding would not be greedy.
OPTIONS = ["--host", "127.0.0.1", "--no-enable-prefix-caching", "--generation-config", "vllm"]
FAULT = re.compile(r"\b\w*(?:Error|Exception): .+|error: .+")
FOLLOW_UP = re.compile(r"(Engine core|WorkerProc) initialization failed")  # another process has shown the cause

Counts = dict[str, int]  # the counters of vLLM by name; that of a position ends with its number


@contextmanager
def running_vllm(launch: Launch, log: Path, is_healthy: Callable[[], bool]) -> Iterator[None]:
    """Run vLLM until the block ends, which begins once vLLM is healthy. A ValueError quotes an error of its log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *launch.arguments, *OPTIONS],
            env={name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"} | launch.environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C of the terminal reaches this process alone, which ends the server
            preexec_fn=partial(ctypes.CDLL(None).prctl, 1, signal.SIGTERM) if sys.platform == "linux" else None,
        )  # prctl(PR_SET_PDEATHSIG, SIGTERM), should this process be killed
    deadline = time.monotonic() + START_SECONDS
    try:
        while not is_healthy():
            if process.poll() is not None:
                faults = FAULT.findall(log.read_text(encoding="utf-8", errors="replace"))
                cause = next((fault for fault in faults[::-1] if not FOLLOW_UP.search(fault)), "it names no error")
                raise ValueError(f"vLLM ended with code {process.returncode}: {safe_line(cause)[:300]}; see {log}")
            if time.monotonic() > deadline:
                raise ValueError(f"vLLM was not ready after {START_SECONDS:g} seconds; see {log}")
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
