"""Decodes the answers of a plan, in this process or in one for each device, each into a journal of its own."""

import multiprocessing
import signal
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch

from data.files import explained, safe_messages, validated
from inference import drafter_specs, timing
from inference.evaluate.answers import Answer, Slot, answer_questions, comparable, from_json, median_answers, to_json
from inference.evaluate.metrics import Summary, summarise
from inference.evaluate.plan import EvaluationPlan
from inference.evaluate.step_times import MedianStepTimes, timing_error
from inference.journal import Journal
from inference.timing import MachineLoad
from inference.verifier.compiled import make_runner
from inference.verifier.sampling import Sampler, Typical

JOURNALS = "journal"  # name of the folder with a journal for each process
MAX_REPEATS = 5  # of a benchmark whose speed-ups are not precise
PRECISION = 0.05  # relative timing error of a speed-up for which no repeat is added
PRELOADED = ["inference.evaluate.worker", "transformers.models.auto.modeling_auto", "transformers.models.llama"]

Repeat = tuple[int, list[str]]  # how often all questions were decoded before, and the benchmarks to decode


class Worker:
    """Process ``number`` of an evaluation, with the base and the drafters loaded; raises ValueError if they cannot."""

    def __init__(self, plan: EvaluationPlan, number: int = 0) -> None:
        self.plan, self.number = plan, number
        torch.set_num_threads(plan.conditions.threads or 1)
        device, model = torch.device(plan.conditions.devices[number]), plan.model
        self.gpu_use, self._has_started = timing.gpu_use(device), False
        self.base = model.load_on(device)
        runner, own = make_runner(self.base, model.compile), plan.conditions.sampling
        self.row_multiple = runner.row_multiple
        self.sessions = {}
        for name, drafter in plan.conditions.drafters.items():
            sampler: Sampler = own.sampler()
            if drafter.is_lossy:
                sampler = Typical(temperature=own.temperature, top_k=own.top_k, top_p=own.top_p, seed=own.seed)
            self.sessions[name] = drafter_specs.make_session(drafter.spec, runner, sampler)

    def run(self, path: Path, load: float | None, repeat: int, benchmarks: list[str]) -> Iterator[bool]:
        """Answer the questions of one repeat that the journal does not hold; yield for each if it was decoded now."""
        plan, conditions = self.plan, self.plan.conditions
        with Journal(path, asdict(conditions)) as journal:
            entries, parts = read_entries(journal), []
            for benchmark in benchmarks:
                own = [entry for entry in entries if (entry.benchmark, entry.repeat) == (benchmark, repeat)]
                done = {(entry.place, entry.answer.drafter): entry.answer for entry in own if entry.answer}
                # Of N processes, each takes every N-th question.
                questions = dict(list(enumerate(plan.questions[benchmark]))[self.number :: len(conditions.devices)])
                parts += [(benchmark, questions, done)] if questions else []
            slots = [((at, name), done) for _, questions, done in parts for at in questions for name in self.sessions]
            unfinished = dict.fromkeys(slot[1] for slot, done in slots if slot not in done)
            for benchmark, questions, done in parts:
                yield from [False] * len(done)
                about = conditions.template, conditions.caps[benchmark], done, repeat
                memory = (unfinished, benchmark == parts[0][0]) if conditions.memory else ()
                for (index, _), answer in answer_questions(self.base, self.sessions, questions, *about, *memory):
                    if not self._has_started:
                        journal.append({"load": load, "gpu_use": self.gpu_use, "row_multiple": self.row_multiple})
                        self._has_started = True
                    entry = {"benchmark": benchmark, "repeat": repeat, "place": index}
                    journal.append(entry | {"load": timing.load_average(), "answer": to_json(answer)})
                    yield True


# ---- processes


def run(plan: EvaluationPlan, folder: Path, repeats: Iterator[Repeat]) -> Iterator[bool]:
    """Answer all questions, into journals in a folder; yield for each answer whether it was decoded now.

    The first of the ``repeats`` is taken when all bases and drafters are loaded, each other one when the answers of the
    one before are in the journals.
    """
    load = timing.running_threads()
    if len(plan.conditions.devices) == 1:
        worker = Worker(plan)
        for repeat in repeats:
            yield from worker.run(journal_path(folder, 0), load, *repeat)
        return
    with _processes(plan, folder, load) as links:
        for link in links:
            _told(link)
        for repeat in repeats:
            for link in links:
                link.send(repeat)
            working = list(links)
            while working:
                for link in (each for each in connection.wait(working) if isinstance(each, Connection)):
                    told = _told(link)
                    if told is None:
                        working.remove(link)
                    else:
                        yield told


def journal_path(folder: Path, number: int) -> Path:
    """The journal of a process."""
    return folder / f"{1 + number}.jsonl"


@contextmanager
def _processes(plan: EvaluationPlan, folder: Path, load: float | None) -> Iterator[list[Connection]]:
    """Start a process for each device, and end them all behind the block.

    They are copies of a server that has imported the libraries and done nothing else: a copy of this process could use
    neither CUDA nor torch's threads, and a new one would import them again.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ExitStack() as stack:
        links = []
        for number in range(len(plan.conditions.devices)):
            link, other = context.Pipe()
            arguments = other, plan, number, journal_path(folder, number), load
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.terminate)
            other.close()  # so that the end of the process is noticed
            links.append(link)
        yield links


def _work(link: Connection, plan: EvaluationPlan, number: int, path: Path, load: float | None) -> None:
    """Load, then decode each repeat that is asked for: tells of each answer whether it is new, and None at the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    with safe_messages(), suppress(ConnectionError):  # the parent has ended
        try:
            worker = Worker(plan, number)
            link.send(None)
            while True:
                for is_new in worker.run(path, load, *link.recv()):
                    link.send(is_new)
                link.send(None)
        except (ValueError, OSError) as error:
            link.send(ValueError(explained(error)))
        except Exception:
            link.send(RuntimeError(traceback.format_exc()))


def _told(link: Connection) -> bool | None:
    try:
        told = link.recv()
    except EOFError:
        raise ChildProcessError("a process of the evaluation was killed: repeat the command to continue") from None
    if isinstance(told, Exception):
        raise told
    return cast("bool | None", told)


# ---- what the journals hold


@dataclass
class CollectedAnswers:
    """The answers of an evaluation, and how busy the machine was."""

    plan: EvaluationPlan
    answers: dict[tuple[str, int], dict[Slot, Answer]] = field(default_factory=dict)  # by benchmark and repeat
    load: MachineLoad = field(default_factory=lambda: MachineLoad(1, 1))
    num_starts: int = 0  # of the command, until all answers were there
    row_multiple: int | None = None  # `Runner.row_multiple`, the largest; None if one of the starts had none

    def num_repeats(self, benchmark: str) -> int:
        """How often all drafters have answered all questions of a benchmark."""
        num_answers = self.plan.num_answers([benchmark])
        return next(n for n in count() if len(self.answers.get((benchmark, n), ())) < num_answers)

    def repeats(self, benchmark: str, drafter: str) -> list[list[Answer]]:
        """A drafter's answers of each complete repeat, in the order of the questions."""
        indices = range(len(self.plan.questions[benchmark]))
        rounds = (self.answers[benchmark, repeat] for repeat in range(self.num_repeats(benchmark)))
        return [[answers[index, drafter] for index in indices] for answers in rounds]

    def timing_errors(self, benchmark: str, num_repeats: int) -> dict[str, float | None]:
        """The `timing_error` of each drafter's speed-up, from the first repeats of a benchmark."""
        times = {name: MedianStepTimes(self.repeats(benchmark, name)[:num_repeats]) for name in self.plan.drafters}
        baseline = times.pop(self.plan.drafters[0])
        return {name: timing_error(own, baseline) for name, own in times.items()}

    def median_answers(self) -> dict[str, dict[str, list[Answer]]]:
        """For each question the answer of median time among its repeats, by benchmark and drafter."""
        names = self.plan.drafters
        return {q: {name: median_answers(self.repeats(q, name)) for name in names} for q in self.plan.questions}

    def summaries(self) -> dict[str, dict[str, Summary]]:
        """Each drafter in comparison with the base alone, by benchmark and drafter."""
        summaries: dict[str, dict[str, Summary]] = {}
        for benchmark, by_drafter in self.median_answers().items():
            baseline = self.plan.drafters[0]
            base, rounds = by_drafter[baseline], self.repeats(benchmark, baseline)
            summaries[benchmark] = {
                drafter: summarise(answers, base, list(zip(self.repeats(benchmark, drafter), rounds, strict=True)))
                for drafter, answers in by_drafter.items()
            }
        return summaries

    def warnings(self) -> list[str]:
        """What speaks against the figures, one line each."""
        lines = self.load.warnings()
        for benchmark in self.plan.questions:
            num_repeats = self.num_repeats(benchmark)
            errors = self.timing_errors(benchmark, num_repeats) if self.plan.conditions.repeats == "auto" else {}
            wide = {drafter: error for drafter, error in errors.items() if not is_precise(error)}
            if told := [f"{name} {'unknown' if e is None else f'± {100 * e:.0f} %'}" for name, e in wide.items()]:
                lines.append(
                    f"the speed-ups on {benchmark} are not yet within {100 * PRECISION:.0f} % after {num_repeats} "
                    f"repeats: {', '.join(told)}"
                )
            for drafter in self.plan.drafters:
                rounds = zip(*self.repeats(benchmark, drafter), strict=True)
                kinds = {first.question_id: list(map(comparable, (first, *again))) for first, *again in rounds}
                if ids := [number for number, own in kinds.items() if any(each != own[0] for each in own)]:
                    lines.append(
                        f"{drafter} decodes {len(ids)} questions of {benchmark} differently in different repeats, "
                        f"question {ids[0]} first: decoding is not deterministic on this device"
                    )
        return lines


def is_precise(error: float | None) -> bool:
    """Whether a timing error is small enough that no repeat is added."""
    return error is not None and error <= PRECISION


def repeats_to_decode(folder: Path, plan: EvaluationPlan) -> Iterator[Repeat]:
    """Yield each repeat and its benchmarks; whether another one is needed is decided when it is asked for."""
    benchmarks, repeats = list(plan.questions), plan.conditions.repeats
    for repeat in range(MAX_REPEATS if repeats == "auto" else repeats):
        if repeat and repeats == "auto":
            found = collect(folder, plan)
            errors = {name: found.timing_errors(name, repeat).values() for name in benchmarks}
            imprecise = [name for name in benchmarks if not all(map(is_precise, errors[name]))]
            benchmarks = benchmarks if imprecise and plan.conditions.memory else imprecise
        if benchmarks:
            yield repeat, benchmarks


def collect(folder: Path, plan: EvaluationPlan) -> CollectedAnswers:
    """Read the journals of all processes."""
    found, entries = CollectedAnswers(plan), []
    for number in range(len(plan.conditions.devices)):
        own = read_entries(Journal(journal_path(folder, number), asdict(plan.conditions)))
        found.num_starts = max(found.num_starts, sum(entry.answer is None for entry in own))
        entries += own
    multiples = [entry.row_multiple or 0 for entry in entries if entry.answer is None]
    found.row_multiple = max(multiples) if all(multiples) and multiples else None
    for entry in entries:
        if entry.answer:
            by_slot = found.answers.setdefault((entry.benchmark, entry.repeat), {})
            by_slot[entry.place, entry.answer.drafter] = entry.answer
    loads = [(entry.answer is None, entry.load) for entry in entries if entry.load is not None]
    found.load = MachineLoad(
        cores=timing.num_cores(),
        threads=(plan.conditions.threads or 1) * len(plan.conditions.devices),
        before=[load for is_start, load in loads if is_start],
        during=max((load for is_start, load in loads if not is_start), default=None),
        gpu_percents=[entry.gpu_use for entry in entries if entry.gpu_use is not None],
    )
    return found


@dataclass(frozen=True)
class Entry:
    """An entry of a journal: an answer with its place, or without one a start of the command."""

    load: float | None
    gpu_use: int | None = None
    row_multiple: int | None = None
    benchmark: str = ""
    repeat: int = 0
    place: int = 0
    answer: Answer | None = None


def read_entries(journal: Journal) -> list[Entry]:
    """The entries of a journal."""

    def read(entry: dict[str, Any]) -> Entry:
        answer = {"answer": from_json(entry["answer"])} if "answer" in entry else {}
        return validated(Entry, entry | answer)

    return list(journal.entries(read))
