"""The processes of an evaluation: in this one, or one for each device."""

from __future__ import annotations

import multiprocessing
import queue as queues
import signal
import traceback
from collections.abc import Callable
from multiprocessing import Process
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from inference.evaluation.share import Plan, Share
from inference.runs import timing

PATIENCE = 1.0  # seconds between two looks at whether the others live


def run(
    plan: Plan, work: dict[str, Any], folder: Path, begin: Callable[[], None], advance: Callable[[bool], None]
) -> None:
    """Answer all questions, into a journal for each process.

    Args:
        plan: What is decoded.
        work: `Plan.work`.
        folder: Of the journals, see `journal_path`.
        begin: Called once nothing in the arguments can stop the work any more: it makes room for new results.
        advance: Told of every answer, and whether it was given now.

    Raises:
        ValueError: What `Share` raises.
    """
    load = timing.running()
    if len(plan.devices) == 1:
        share = Share(plan)
        begin()
        for is_new in share.run(journal_path(folder, 0), work, load):
            advance(is_new)
        return
    context = multiprocessing.get_context("spawn")  # a forked process could use neither CUDA nor torch's threads
    told, go = context.Queue(), context.Event()
    arguments = [
        (plan, number, journal_path(folder, number), work, load, told, go) for number in range(len(plan.devices))
    ]
    processes = [context.Process(target=_share, args=each, daemon=True) for each in arguments]
    try:
        for process in processes:
            process.start()
        _listen(processes, told, "ready", lambda said: None)
        begin()
        go.set()
        _listen(processes, told, "finished", advance)
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()


def journal_path(folder: Path, number: int) -> Path:
    """The journal of a process."""
    return folder / f"{1 + number}.jsonl"


def _listen(processes: list[Process], told: Queue, until: str, advance: Callable[[bool], None]) -> None:
    """Pass on what the processes tell, until all have said ``until``."""
    left = set(range(len(processes)))
    while left:
        try:
            number, what, said = told.get(timeout=PATIENCE)
        except queues.Empty:
            dead = [number for number in left if not processes[number].is_alive()]
            if dead and told.empty():
                raise RuntimeError(
                    f"process {1 + dead[0]} ended with exit code {processes[dead[0]].exitcode}"
                ) from None
            continue
        match what:
            case "answer":
                advance(said)
            case "refused":
                raise ValueError(said)
            case "failed":
                raise RuntimeError(f"process {1 + number} failed:\n{said}")
            case _ if what == until:
                left.discard(number)


def _share(
    plan: Plan, number: int, path: Path, work: dict[str, Any], load: float | None, told: Queue, go: Event
) -> None:
    """One process: its part of the questions, as long as the process that began it lives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the parent's to stop
    parent = multiprocessing.parent_process()
    try:
        share = Share(plan, number)
        told.put((number, "ready", None))
        while not go.wait(PATIENCE):
            if not parent.is_alive():
                return
        for is_new in share.run(path, work, load, parent.is_alive):
            told.put((number, "answer", is_new))
        told.put((number, "finished", None))
    except ValueError as error:
        told.put((number, "refused", str(error)))
    except Exception:
        told.put((number, "failed", traceback.format_exc()))
