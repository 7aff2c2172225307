"""Measures every arm: starts or opens its server, asks it all that the journal does not hold, and ends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from data.files import validated
from inference import timing
from inference.evaluation.served import vllm_server
from inference.evaluation.served.client import ServerClient, ServerError
from inference.evaluation.served.load import NO_TOKEN_IDS, Server, measure
from inference.evaluation.served.plan import BASELINE, ServedPlan
from inference.journal import Journal
from inference.results import records
from inference.results.metrics import Summary, first_difference, pair_answers
from inference.results.served_figures import SpeculationCounts, served_name
from inference.results.served_runs import ServedRun, summarise_run
from inference.verifier.base import BaseConfig
from inference.vllm.command import make_launch

JOURNAL = "served.jsonl"
OpenServer = Callable[[str], AbstractContextManager[Server]]
Key = tuple[str, str, int]  # benchmark, drafter and number of requests at once


@dataclass
class ServedRuns:
    """The runs of an evaluation.

    Args:
        plan: What was measured.
        runs: The runs.
        loads: `timing.running_threads` before each server was asked.
        notes: What a reader must know about a server, one line each.
    """

    plan: ServedPlan
    runs: dict[Key, ServedRun]
    loads: list[float]
    notes: list[str]

    def summaries(self) -> dict[str, dict[str, Summary]]:
        """Each drafter with each number of requests at once, by benchmark and name; compared with as many requests."""
        plan = self.plan
        return {
            benchmark: {
                served_name(drafter, at_once): summarise_run(
                    self.runs[benchmark, drafter, at_once],
                    self.runs[benchmark, plan.baseline, at_once],
                    plan.engine,
                    drafter,
                    at_once,
                )
                for drafter in plan.arms
                for at_once in plan.concurrency
            }
            for benchmark in plan.questions
        }

    def answers(self) -> dict[str, dict[str, list[records.Answer]]]:
        """The answers, by benchmark and name."""
        return {
            benchmark: {
                served_name(drafter, at_once): self.runs[benchmark, drafter, at_once].answers
                for drafter in self.plan.arms
                for at_once in self.plan.concurrency
            }
            for benchmark in self.plan.questions
        }

    def baseline_differences(self) -> list[str]:
        """One line for each number of requests at which the baseline itself writes other texts than with the first."""
        first, *others = self.plan.concurrency
        lines = []
        for benchmark in self.plan.questions:
            own = self.runs[benchmark, self.plan.baseline, first].answers
            for at_once in others:
                pairs = pair_answers(self.runs[benchmark, self.plan.baseline, at_once].answers, own)
                if count := sum(first_difference(*pair) is not None for pair in pairs):
                    lines.append(
                        f"{self.plan.baseline} itself writes {count} of {len(pairs)} answers of {benchmark} "
                        f"differently with {at_once} requests at once than with {first}: the order of sums depends on "
                        "the batch"
                    )
        return lines


def measure_all(
    plan: ServedPlan,
    base: BaseConfig,
    journal_path: Path,
    overwrite: bool,
    open_server: OpenServer,
    on_ready: Callable[[], None],
    on_answers: Callable[[int], None],
) -> ServedRuns:
    """Measure what the journal does not hold, and return all runs.

    The journal has an entry ``{"load", "notes"}`` for each server that was asked, and one for each run.

    Args:
        plan: What is measured.
        base: The base, for the prompts.
        journal_path: File of the journal.
        overwrite: Whether runs that the journal holds are measured again.
        open_server: Returns a context manager that gives the `Server` of the arm of this name.
        on_ready: Called before the first answer is kept, with a server that answers.
        on_answers: Called with the number of answers that are there.
    """
    has_started = False
    with Journal(journal_path, plan.settings, "replace" if overwrite else "continue") as journal:
        runs = _read_runs(journal)
        for drafter in plan.arms:
            missing = [(benchmark, at) for benchmark, at in plan.runs if (benchmark, drafter, at) not in runs]
            on_answers(sum(len(plan.questions[name]) for name, at in plan.runs if (name, at) not in missing))
            # A drafter that remembers texts would know the questions from the run before.
            groups = [[run] for run in missing] if drafter in plan.remembering else [missing] if missing else []
            for group in groups:
                load = timing.running_threads()
                with open_server(drafter) as server:
                    server.probe([prompt for prompts in plan.prompts.values() for prompt in prompts])
                    if not has_started:
                        on_ready()
                        has_started = True
                    notes = [] if "return_token_ids" in server.extra else [f"{drafter} {NO_TOKEN_IDS}"]
                    journal.append({"load": load, "notes": notes})
                    for benchmark, at_once in group:
                        run = _measure(plan, server, (benchmark, drafter, at_once), lambda: on_answers(1))
                        journal.append(_to_json((benchmark, drafter, at_once), run))
        runs = _read_runs(journal)  # those that are new too: their times are then rounded whoever asks
        starts = [entry for entry in journal.entries(lambda entry: entry) if "answers" not in entry]
    loads = [validated(float, entry["load"]) for entry in starts if entry.get("load") is not None]
    notes = [note for entry in starts for note in validated(list[str], entry.get("notes", []))]
    return ServedRuns(plan, runs, loads, list(dict.fromkeys(notes)))


def _measure(plan: ServedPlan, server: Server, key: Key, on_answer: Callable[[], None]) -> ServedRun:
    """Measure one run."""
    benchmark, drafter, at_once = key
    asked = list(zip(plan.questions[benchmark], plan.prompts[benchmark], strict=True))
    name, cap = served_name(drafter, at_once), plan.caps[benchmark]
    run = measure(server, name, asked, at_once, cap, vllm_server.cpu_seconds, on_answer)
    if run.counts is None and server.session is not None and drafter == BASELINE:
        return replace(run, counts=SpeculationCounts(0, 0, drafts=0))  # vLLM without speculation counts none
    return run


@contextmanager
def vllm(plan: ServedPlan, base: BaseConfig, logs: Path, keeps_logs: bool, drafter: str) -> Iterator[Server]:
    """Start vLLM for an arm.

    Args:
        plan: What is measured.
        base: The base.
        logs: Folder for the outputs of the servers.
        keeps_logs: Whether it is there after the evaluation.
        drafter: Name of the arm.
    """
    spec, port = plan.arms[drafter], vllm_server.free_port()
    launch = make_launch(plan.base, None if spec == BASELINE else spec, dtype=plan.dtype, port=port)
    log = new_log(logs, 1 + list(plan.arms).index(drafter))
    try:
        with vllm_server.running(launch, port, plan.engine_args, log) as (client, session):
            yield Server(client, base, plan.template, session=session)
    except ServerError as error:
        place = f"; the output of the server is in {log}" if keeps_logs else ""
        raise ServerError(f"{error}{place}", error.status) from error


def new_log(logs: Path, arm: int) -> Path:
    """The log of an arm's next server: N.log, or N-2.log and so on after others of its servers."""
    names = chain([f"{arm}.log"], (f"{arm}-{number}.log" for number in count(2)))
    return next(logs / name for name in names if not (logs / name).exists())


@contextmanager
def endpoint(plan: ServedPlan, base: BaseConfig, api_key_env: str | None, name: str) -> Iterator[Server]:
    """Open a server that runs.

    Args:
        plan: What is measured.
        base: The base.
        api_key_env: Environment variable that holds the API key.
        name: Name of the arm.
    """
    with closing(ServerClient(plan.arms[name], api_key_env)) as client:
        is_off = plan.switches_drafter and name == plan.baseline
        yield Server(client, base, plan.template, uses_drafter=not is_off)


def _read_runs(journal: Journal) -> dict[Key, ServedRun]:
    return dict(read for read in journal.entries(_read_run) if read)


def _to_json(key: Key, run: ServedRun) -> dict[str, Any]:
    benchmark, drafter, at_once = key
    about = {"benchmark": benchmark, "drafter": drafter, "concurrency": at_once}
    counts = asdict(run.counts) if run.counts else None
    measured = {"seconds": run.seconds, "cpu_seconds": run.cpu_seconds, "counts": counts}
    return {**about, **measured, "answers": [records.to_json(answer) for answer in run.answers]}


def _read_run(entry: dict[str, Any]) -> tuple[Key, ServedRun] | None:
    """The run of an entry; None for the entry of a start."""
    if "answers" not in entry:
        return None
    key = validated(Key, (entry["benchmark"], entry["drafter"], entry["concurrency"]))
    seconds, cpu = validated(tuple[float, float | None], (entry["seconds"], entry["cpu_seconds"]))
    counts = validated(SpeculationCounts | None, entry["counts"])
    answers = [records.from_json(answer) for answer in entry["answers"]]
    if not answers or not seconds > 0:
        raise ValueError("a run has answers, and took time")
    return key, ServedRun(answers, seconds, cpu, counts)
