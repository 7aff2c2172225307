"""Runs the processes of an evaluation: this one, or one for each device."""

from __future__ import annotations

import multiprocessing
import queue as queues
import signal
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path

from data.files import safe_messages
from inference import timing
from inference.evaluation.plan import EvaluationPlan
from inference.evaluation.worker import Worker

PRELOADED = ["inference.evaluation.worker", "transformers.models.auto.modeling_auto", "transformers.models.llama"]
POLLING_SECONDS = 1.0  # between two checks that the other processes are alive


Repeat = tuple[int, list[str]]  # how often all questions were decoded before, and the benchmarks to decode


def run(
    plan: EvaluationPlan,
    folder: Path,
    repeats: Iterable[Repeat],
    on_ready: Callable[[], None],
    on_answer: Callable[[bool], None],
) -> None:
    """Answer all questions, into one journal for each process.

    Args:
        plan: What is decoded.
        folder: Folder of the journals; see `journal_path`.
        repeats: The repeats; the next one is taken when the answers of the last one are in the journals.
        on_ready: Called once all bases and drafters are loaded, so that no mistake in the arguments can stop the
            evaluation any more; only then old results may be deleted.
        on_answer: Called for every answer, with whether it was decoded now.

    Raises:
        ValueError: A base or a drafter cannot be loaded.
    """
    load = timing.running_threads()
    if len(plan.devices) == 1:
        worker = Worker(plan)
        on_ready()
        for repeat, benchmarks in repeats:
            for is_new in worker.run(journal_path(folder, 0), load, repeat, benchmarks):
                on_answer(is_new)
        return
    # Copies of a server that has imported the libraries and done nothing else: a copy of this process could use neither
    # CUDA nor torch's threads, and a new one would import them again.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    messages: Queue = context.Queue()
    orders: list[Queue] = [context.Queue() for _ in plan.devices]
    processes = [
        context.Process(
            target=_work, args=(plan, number, journal_path(folder, number), load, messages, own), daemon=True
        )
        for number, own in enumerate(orders)
    ]
    try:
        for process in processes:
            process.start()
        _listen(processes, messages, "ready", lambda is_new: None)
        on_ready()
        for order in repeats:
            for own in orders:
                own.put(order)
            _listen(processes, messages, "finished", on_answer)
        for own in orders:
            own.put(None)
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()


def journal_path(folder: Path, number: int) -> Path:
    """The journal of a process."""
    return folder / f"{1 + number}.jsonl"


def _listen(processes: Sequence[BaseProcess], messages: Queue, until: str, on_answer: Callable[[bool], None]) -> None:
    """Handle the messages of the processes until all of them have sent ``until``."""
    waiting = set(range(len(processes)))
    while waiting:
        try:
            number, kind, content = messages.get(timeout=POLLING_SECONDS)
        except queues.Empty:
            dead = [number for number in waiting if not processes[number].is_alive()]
            if dead and messages.empty():
                raise RuntimeError(
                    f"process {1 + dead[0]} ended with exit code {processes[dead[0]].exitcode}"
                ) from None
            continue
        match kind:
            case "answer":
                on_answer(content)
            case "refused":
                raise ValueError(content)
            case "failed":
                raise RuntimeError(f"process {1 + number} failed:\n{content}")
            case _ if kind == until:
                waiting.discard(number)


@safe_messages()
def _work(plan: EvaluationPlan, number: int, path: Path, load: float | None, messages: Queue, orders: Queue) -> None:
    """One process: answers its questions of each repeat that is ordered, for as long as its parent process lives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    parent = multiprocessing.parent_process()
    assert parent is not None
    try:
        worker = Worker(plan, number)
        messages.put((number, "ready", None))
        while order := _next_order(orders, parent):
            for is_new in worker.run(path, load, *order, parent.is_alive):
                messages.put((number, "answer", is_new))
            messages.put((number, "finished", None))
    except ValueError as error:
        messages.put((number, "refused", str(error)))
    except Exception:
        messages.put((number, "failed", traceback.format_exc()))


def _next_order(orders: Queue, parent: BaseProcess) -> Repeat | None:
    """The next repeat; None if there is none, or if the parent process has ended."""
    while parent.is_alive():
        try:
            order: Repeat | None = orders.get(timeout=POLLING_SECONDS)
        except queues.Empty:
            continue
        return order
    return None
