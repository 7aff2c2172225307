"""The decoding thread: requests wait in a bounded queue and are decoded one at a time, first come, first served."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from data.files import print_traceback
from drafters.protocol import Drafter, NoDrafter
from inference import drafter_specs
from inference.serve.errors import RATE_LIMIT, SERVER, ApiError
from inference.serve.metrics import Metrics
from inference.serve.written_text import Addition, TextWriter, TokenTexts
from inference.verifier.base import Base
from inference.verifier.options import SamplingOptions
from inference.verifier.runner import Runner
from inference.verifier.session import Session, StepCost

WARM_UP_TOKENS = 4
RETRY_AFTER_SECONDS = 1


@dataclass(frozen=True)
class TextRequest:
    """One text that is asked for.

    Args:
        prompt: Token ids of the prompt.
        max_new_tokens: Maximum number of new tokens. The text also ends where the base's context ends.
        sampling: How the base's tokens are chosen.
        stops: Stop strings.
        num_logprobs: As in `TextWriter`.
        uses_drafter: Whether the drafter drafts; otherwise the base decodes alone.
        shows_steps: As in `TextWriter`.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: SamplingOptions
    stops: Sequence[str] = ()
    num_logprobs: int | None = None
    uses_drafter: bool = True
    shows_steps: bool = False


@dataclass(frozen=True)
class Progress:
    """A text of a job has grown: the index of the text, and what a step added to it."""

    index: int
    addition: Addition


Outcome = Progress | Exception | None  # None: the job is done


@dataclass(eq=False)
class Job:
    """The texts of one HTTP request.

    Args:
        texts: The texts, which are decoded one after the other.
        report: Called by the decoding thread with the progress of the texts; at last with None, or with the error that
            ended the job. After `DecodingThread.cancel` it may not be called again.
    """

    texts: Sequence[TextRequest]
    report: Callable[[Outcome], None]
    is_cancelled: bool = field(default=False, init=False)


class DecodingThread:
    """Decodes the texts of all requests with one base and one drafter, in a thread of its own.

    Every text starts with an empty cache and a drafter that remembers nothing, so that no request can change or see
    anything of another one.

    Args:
        base: The base.
        drafter: Name of the drafter, as on the command line.
        max_waiting: Maximum number of requests that wait while another one is decoded.
        metrics: Counts what is decoded.

    Raises:
        ValueError: The drafter is unknown or does not fit the base, or the base cannot read draft trees.
    """

    def __init__(self, base: Base, drafter: str, max_waiting: int, metrics: Metrics) -> None:
        self.base, self.max_waiting, self.metrics = base, max_waiting, metrics
        self._runner = Runner(base)
        self._drafter: Drafter = drafter_specs.make(drafter, self._runner)
        self._token_texts = TokenTexts(base.tokenizer)
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._is_stopping = False
        self._changed = threading.Condition()
        metrics.watch_queue(lambda: self.num_waiting, lambda: self.num_running)
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)

    # ---- called by the server

    def start(self) -> None:
        """Start the thread, which first decodes a few tokens: the first steps of a process are slow."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Append a job to the queue.

        Raises:
            ApiError: The queue is full (429), or the server is stopping or has failed (503).
        """
        with self._changed:
            if self._is_stopping:
                raise ApiError(503, "the server is stopping", SERVER)
            if not self._thread.is_alive():
                raise ApiError(503, "the decoding thread has ended: the server must be restarted", SERVER)
            if len(self._waiting) >= self.max_waiting:
                raise ApiError(
                    429,
                    f"{self.max_waiting} requests are waiting, which is the maximum: try again later",
                    RATE_LIMIT,
                    code="queue_full",
                )
            self._waiting.append(job)
            self._changed.notify_all()

    def cancel(self, job: Job) -> None:
        """Remove a job from the queue, or stop it at the end of the running step; a job that is done stays done."""
        with self._changed:
            job.is_cancelled = True
            with suppress(ValueError):
                self._waiting.remove(job)

    @property
    def is_alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Number of requests that are being decoded, 0 or 1."""
        return int(self._running is not None)

    def stop(self) -> None:
        """End the thread: the job that runs stops at the end of its step, and those that wait are given up."""
        with self._changed:
            self._is_stopping = True
            jobs = [*self._waiting, *([self._running] if self._running else [])]
            self._waiting.clear()
            for job in jobs:
                job.is_cancelled = True
            self._changed.notify_all()
        for job in jobs:
            job.report(ApiError(503, "the server is stopping", SERVER))
        if self._thread.is_alive():
            self._thread.join()

    # ---- the thread

    def _run(self) -> None:
        warm_up = TextRequest([min(self.base.eos, default=0)], WARM_UP_TOKENS, SamplingOptions())
        with suppress(Exception):  # the first request shows what is wrong
            for _ in self._write(warm_up):
                pass
        while job := self._next():
            try:
                self._do(job)
                outcome: Outcome = None
            except Exception as error:  # requests were checked before, so it is a fault of the server
                with suppress(OSError):
                    print_traceback(type(error), error, error.__traceback__)
                outcome = ApiError(500, "decoding failed, and the server's log says why", SERVER)
            self._forget()
            with self._changed:
                self._running = None
            if not job.is_cancelled:
                job.report(outcome)
            del job

    def _next(self) -> Job | None:
        """Wait for a job, and take it from the queue; None once the thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_stopping)
            if self._is_stopping:
                return None
            self._running = self._waiting.popleft()
            return self._running

    def _do(self, job: Job) -> None:
        """Decode the texts of a job, unless it is cancelled."""
        for index, text in enumerate(job.texts):
            self.metrics.count_prompt(len(text.prompt))
            for addition, cost in self._write(text):
                self.metrics.count_step(addition, cost)
                if job.is_cancelled:
                    return
                job.report(Progress(index, addition))

    def _write(self, text: TextRequest) -> Iterator[tuple[Addition, StepCost]]:
        """Decode a text, and yield what each step adds to it and costs."""
        self._drafter.reset()
        # Top-p keeps the most probable token, so at temperature 0 it changes nothing.
        sampling = text.sampling if text.sampling.temperature else SamplingOptions()
        session = Session(self._runner, self._drafter if text.uses_drafter else NoDrafter(), sampling.sampler())
        end = session.end_of(text.prompt, text.max_new_tokens)
        writer = TextWriter(
            session, self._token_texts, self.base.eos, end, text.stops, text.num_logprobs, text.shows_steps
        )
        for emitted, cost in session.decode(text.prompt, text.max_new_tokens, self.base.eos):
            addition = writer.add(emitted, cost)
            yield addition, cost
            if addition.finish_reason:
                return

    def _forget(self) -> None:
        """Drop what the last request has left in the cache and the drafter."""
        self._runner.reset()
        self._drafter.reset()
