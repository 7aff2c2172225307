"""Decodes the answers of a plan by our own loop, each at once into a journal, and reads what the journal holds."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch

from data.files import validated
from inference import drafter_specs, timing
from inference.evaluate.answers import Answer, Slot, answer_questions, comparable, from_json, median_answers, to_json
from inference.evaluate.metrics import Summary, summarise
from inference.evaluate.plan import EvaluationPlan
from inference.evaluate.step_times import MedianStepTimes, timing_error
from inference.journal import Journal
from inference.timing import MachineLoad
from inference.verifier.base import Base
from inference.verifier.compiled import make_runner
from inference.verifier.session import Session

JOURNAL = Path("journal", "1.jsonl")  # in the folder of the results
MAX_REPEATS = 5  # of a benchmark whose speed-ups are not precise
PRECISION = 0.05  # relative timing error of a speed-up for which no repeat is added

Repeat = tuple[int, list[str]]  # how often all questions were decoded before, and the benchmarks to decode


def run(plan: EvaluationPlan, path: Path, repeats: Iterator[Repeat]) -> Iterator[bool]:
    """Answer all questions, into a journal; yield for each answer whether it was decoded now.

    The first of the ``repeats`` is taken when the base and all drafters are loaded, each other one when the answers of
    the one before are in the journal. Raises ValueError if the base or a drafter cannot be loaded.
    """
    conditions, device = plan.conditions, torch.device(plan.conditions.devices[0])
    start: dict[str, Any] = {"load": timing.running_threads(), "gpu_use": timing.gpu_use(device)}
    torch.set_num_threads(conditions.threads or 1)
    base = plan.model.load_on(device)
    runner, sampling = make_runner(base, plan.model.compile), conditions.sampling
    start["row_multiple"] = runner.row_multiple
    sessions = {}
    for name, drafter in conditions.drafters.items():
        sessions[name] = drafter_specs.make_session(drafter.spec, runner, sampling.sampler())
    for repeat, benchmarks in repeats:
        with Journal(path, asdict(conditions)) as journal:
            yield from _decode(plan, base, sessions, journal, repeat, benchmarks, start)


def _decode(
    plan: EvaluationPlan,
    base: Base,
    sessions: dict[str, Session],
    journal: Journal,
    repeat: int,
    benchmarks: list[str],
    start: dict[str, Any],
) -> Iterator[bool]:
    """Answer the questions of one repeat that the journal does not hold; it gets the ``start`` before the first."""
    done: dict[str, dict[Slot, Answer]] = {benchmark: {} for benchmark in benchmarks}
    for entry in read_entries(journal):
        if entry.answer and entry.repeat == repeat and entry.benchmark in done:
            done[entry.benchmark][entry.place, entry.answer.drafter] = entry.answer
    questions = {benchmark: dict(enumerate(plan.questions[benchmark])) for benchmark in benchmarks}
    slots = [(name, (place, drafter)) for name in benchmarks for place in questions[name] for drafter in sessions]
    unfinished = dict.fromkeys(slot[1] for name, slot in slots if slot not in done[name])
    for benchmark in benchmarks:
        yield from [False] * len(done[benchmark])
        about = plan.conditions.template, plan.conditions.caps[benchmark], done[benchmark], repeat
        memory = (unfinished, benchmark == benchmarks[0]) if plan.conditions.memory else ()
        for (place, _), answer in answer_questions(base, sessions, questions[benchmark], *about, *memory):
            if start:
                journal.append(start)
                start.clear()
            slot = {"benchmark": benchmark, "repeat": repeat, "place": place}
            journal.append(slot | {"load": timing.load_average(), "answer": to_json(answer)})
            yield True


# ---- what the journal holds


@dataclass
class CollectedAnswers:
    """The answers of an evaluation, and how busy the machine was."""

    plan: EvaluationPlan
    answers: dict[tuple[str, int], dict[Slot, Answer]] = field(default_factory=dict)  # by benchmark and repeat
    load: MachineLoad = field(default_factory=lambda: MachineLoad(1, 1))
    num_starts: int = 0  # of the command, until all answers were there
    row_multiple: int | None = None  # `Runner.row_multiple`; None if one of the starts had none

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


def repeats_to_decode(path: Path, plan: EvaluationPlan) -> Iterator[Repeat]:
    """Yield each repeat and its benchmarks; whether another one is needed is decided when it is asked for."""
    benchmarks, repeats = list(plan.questions), plan.conditions.repeats
    for repeat in range(MAX_REPEATS if repeats == "auto" else repeats):
        if repeat and repeats == "auto":
            found = collect(path, plan)
            errors = {name: found.timing_errors(name, repeat).values() for name in benchmarks}
            imprecise = [name for name in benchmarks if not all(map(is_precise, errors[name]))]
            benchmarks = benchmarks if imprecise and plan.conditions.memory else imprecise
        if benchmarks:
            yield repeat, benchmarks


def collect(path: Path, plan: EvaluationPlan) -> CollectedAnswers:
    """Read the journal."""
    entries = read_entries(Journal(path, asdict(plan.conditions)))
    starts = [entry for entry in entries if entry.answer is None]
    multiples = [start.row_multiple or 0 for start in starts]
    collected = CollectedAnswers(plan, num_starts=len(starts), row_multiple=min(multiples, default=0) or None)
    for entry in entries:
        if entry.answer:
            answers = collected.answers.setdefault((entry.benchmark, entry.repeat), {})
            answers[entry.place, entry.answer.drafter] = entry.answer
    collected.load = MachineLoad(
        cores=timing.num_cores(),
        threads=plan.conditions.threads or 1,
        before=[start.load for start in starts if start.load is not None],
        during=max((entry.load for entry in entries if entry.answer and entry.load is not None), default=None),
        gpu_percents=[start.gpu_use for start in starts if start.gpu_use is not None],
    )
    return collected


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
