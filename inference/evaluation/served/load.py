"""The load generator: a fixed number of requests at once; where one has ended, the next question is asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import Lock, Thread
from typing import Any, TypeVar

from data.benchmarks import Question
from data.reasoning import decode_answer
from inference.evaluation.served.client import OWN_SERVER, REFUSALS, Completion, ServedModel, ServerClient, ServerError
from inference.prompts import encode_question
from inference.results.records import Answer, Turn
from inference.results.served_runs import ServedRun
from inference.verifier.base import BaseConfig

Result = TypeVar("Result")
WARM_UP_TOKENS = 16
NO_TOKEN_IDS = "sends no token ids: they are encoded again from its texts, so that an equal answer may count as another"


@dataclass
class Server:
    """A server that is asked.

    Args:
        client: Its client.
        base: The base that it serves, for the prompts.
        template: Chat template.
        uses_drafter: Whether the drafter drafts; false is understood by `drafters serve` only.
        session: Session of its processes, whose CPU time is measured; None if it runs elsewhere.
        model: The model that is asked for.
        extra: Further fields of each request.
    """

    client: ServerClient
    base: BaseConfig
    template: str
    uses_drafter: bool = True
    session: int | None = None
    model: ServedModel = field(init=False)
    extra: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self._encoding = Lock()  # a tokenizer is used by one thread at a time
        self.model, self.extra = self.client.model(), {"return_token_ids": True}
        if self.is_own:
            self.extra["use_drafter"] = self.uses_drafter

    @property
    def is_own(self) -> bool:
        """Whether it is `drafters serve`."""
        return self.model.owner == OWN_SERVER

    def probe(self, prompts: Sequence[Sequence[int]]) -> None:
        """Ask for one token, and leave token ids out of all requests if the server does not know that field.

        Args:
            prompts: All first prompts.

        Raises:
            ServerError: The server does not answer, or a prompt does not fit into its context.
        """
        if (longest := max(map(len, prompts))) >= self._context_length:
            raise ServerError(
                f"{self.client.root} reads at most {self._context_length} tokens, and a prompt has {longest}: give it "
                "a longer context, or choose other questions"
            )
        try:
            knows_field = self._complete(prompts[0], 1).token_ids is not None
        except ServerError as error:
            if error.status not in REFUSALS:
                raise
            knows_field = False
        if not knows_field:
            del self.extra["return_token_ids"]
            self._complete(prompts[0], 1)

    def warm_up(self, prompts: Sequence[Sequence[int]]) -> None:
        """Continue some prompts at once: the first steps of an engine, and those of each batch size, are slow."""
        list(at_once([partial(self._complete, prompt, WARM_UP_TOKENS) for prompt in prompts], len(prompts)))

    def answer(self, name: str, question: Question, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        """Answer all turns of a question; each prompt contains the server's own earlier answers.

        A later turn that no longer fits into the base's context ends the answer early.

        Args:
            name: Name of the drafter in the results.
            question: The question.
            prompt: Its first prompt.
            max_new_tokens: Maximum number of tokens of a turn.
        """
        messages: list[tuple[str, str]] = []
        turns: list[Turn] = []
        ended: list[bool] = []
        for text in question.turns:
            messages.append(("user", text))
            if turns:
                with self._encoding:
                    prompt = encode_question(self.base, question, messages, self.template)
                if len(prompt) >= self._context_length:
                    break
            reply = self._complete(prompt, max_new_tokens)
            turn = self._turn(reply, len(prompt))
            turns.append(turn)
            ended.append(reply.ended)
            messages.append(("assistant", turn.text))
        return Answer(question.question_id, question.category, name, turns, ended)

    @property
    def _context_length(self) -> int:
        return min(self.base.context_length, self.model.context_length or self.base.context_length)

    def _complete(self, prompt: Sequence[int], max_new_tokens: int) -> Completion:
        max_new_tokens = min(max_new_tokens, self._context_length - len(prompt))
        return self.client.complete(self.model.name, prompt, max_new_tokens, self.extra)

    def _turn(self, reply: Completion, prompt_tokens: int) -> Turn:
        tokenizer: Any = self.base.tokenizer
        with self._encoding:
            token_ids, text = reply.token_ids, reply.text
            if token_ids is not None:
                decoded = decode_answer(token_ids, tokenizer)
                text = self.client.without_key(decoded)
                token_ids = token_ids if text == decoded else None  # which would spell the key
            if token_ids is None:
                token_ids = tokenizer(text, add_special_tokens=False).input_ids
                if reply.ended and tokenizer.eos_token_id is not None:
                    token_ids.append(tokenizer.eos_token_id)
        return Turn(text.strip(), list(token_ids), prompt_tokens, [], reply.seconds, arrivals=reply.arrivals)


def at_once(tasks: Sequence[Callable[[], Result]], num_threads: int) -> Iterator[Result]:
    """Run tasks in threads and yield their results in order; after an error no further task is begun.

    Nobody waits for the threads of a `ThreadPoolExecutor` to end but Python itself when it exits, and a request to a
    silent server cannot be interrupted: these threads end with the process.
    """
    futures: list[Future[Result]] = [Future() for _ in tasks]
    waiting = iter(list(zip(futures, tasks, strict=True)))

    def work() -> None:
        for future, task in waiting:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(task())
                except BaseException as error:
                    future.set_exception(error)

    for _ in range(num_threads):
        Thread(target=work, daemon=True).start()
    try:
        for future in futures:
            yield future.result()
    finally:
        for future in futures:
            future.cancel()


def measure(
    server: Server,
    name: str,
    questions: Sequence[tuple[Question, Sequence[int]]],
    concurrency: int,
    max_new_tokens: int,
    cpu_seconds: Callable[[int], float | None],
    on_answer: Callable[[], None],
) -> ServedRun:
    """Answer all questions, with a fixed number of requests at once.

    Args:
        server: The server.
        name: Name of the drafter in the results.
        questions: The questions with their first prompts, at least as many as requests at once.
        concurrency: Number of requests at once.
        max_new_tokens: Maximum number of tokens of a turn.
        cpu_seconds: Returns the CPU seconds of a session of processes.
        on_answer: Called for every answer.

    Raises:
        ServerError: A request fails.
    """

    def cpu() -> float | None:
        return None if server.session is None else cpu_seconds(server.session)

    server.warm_up([prompt[::-1] for _, prompt in questions[:concurrency]])  # no prompt is known before it is measured
    counts, cpu_before, started = server.client.counts(), cpu(), time.perf_counter()
    answers = []
    for answer in at_once([partial(server.answer, name, *asked, max_new_tokens) for asked in questions], concurrency):
        answers.append(answer)
        on_answer()
    seconds, cpu_after = time.perf_counter() - started, cpu()
    after = server.client.counts()
    return ServedRun(
        answers,
        seconds,
        cpu_after - cpu_before if cpu_after is not None and cpu_before is not None else None,
        after - counts if after and counts else None,
    )
