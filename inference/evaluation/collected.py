"""All answers of an evaluation, collected from the journals of its processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from data.files import validated
from inference import timing
from inference.evaluation import processes
from inference.evaluation.answering import Slot, without_times
from inference.evaluation.plan import NEW_SETTINGS, EvaluationPlan
from inference.evaluation.worker import read_answers
from inference.journal import Journal
from inference.results import metrics, records
from inference.results.metrics import Summary
from inference.results.records import Answer
from inference.results.step_times import TypicalTimes, timing_error

T = TypeVar("T")
PRECISION = 0.05  # relative timing error of a speed-up for which no repeat is added


@dataclass
class CollectedAnswers:
    """The answers of an evaluation, and how busy the machine was.

    Args:
        plan: What was decoded.
        answers: The answers, by benchmark and repeat, then by question and drafter.
        machine: How busy the machine was.
        num_starts: How often the command was started until all answers were there.
    """

    plan: EvaluationPlan
    answers: dict[tuple[str, int], dict[Slot, Answer]] = field(default_factory=dict)
    machine: timing.MachineLoad = field(default_factory=lambda: timing.MachineLoad(1, 1))
    num_starts: int = 0

    def num_repeats(self, benchmark: str) -> int:
        """How often all drafters have answered all questions of a benchmark."""
        num_answers = self.plan.num_answers([benchmark])
        return next(n for n in count() if len(self.answers.get((benchmark, n), ())) < num_answers)

    def repeats(self, benchmark: str, drafter: str) -> list[list[Answer]]:
        """A drafter's answers of each complete repeat, in the order of the questions."""
        indices = range(len(self.plan.questions[benchmark]))
        return [
            [self.answers[benchmark, repeat][index, drafter] for index in indices]
            for repeat in range(self.num_repeats(benchmark))
        ]

    def timing_errors(self, benchmark: str, num_repeats: int) -> dict[str, float | None]:
        """The `timing_error` of each drafter's speed-up, from the first repeats of a benchmark."""
        baseline, *drafters = self.plan.drafters
        base_times = TypicalTimes(self.repeats(benchmark, baseline)[:num_repeats])
        return {
            drafter: timing_error(TypicalTimes(self.repeats(benchmark, drafter)[:num_repeats]), base_times)
            for drafter in drafters
        }

    def imprecise_speedups(self) -> list[str]:
        """One line for each benchmark with speed-ups that are not precise after the last repeat that may be added."""
        lines = []
        for benchmark in self.plan.questions:
            num_repeats = self.num_repeats(benchmark)
            errors = self.timing_errors(benchmark, num_repeats)
            wide = {drafter: error for drafter, error in errors.items() if not is_precise(error)}
            if self.plan.repeats == "auto" and wide:
                known = [f"{drafter} {'unknown' if e is None else f'± {100 * e:.0f} %'}" for drafter, e in wide.items()]
                lines.append(
                    f"the speed-ups on {benchmark} are not yet within {100 * PRECISION:.0f} % after {num_repeats} "
                    f"repeats, the limit: {', '.join(known)}; a larger --max-repeats continues this evaluation"
                )
        return lines

    def median_answers(self) -> dict[str, dict[str, list[Answer]]]:
        """For each question the answer of median time among its repeats, by benchmark and drafter."""
        return {
            benchmark: {
                drafter: records.median_answers(self.repeats(benchmark, drafter)) for drafter in self.plan.drafters
            }
            for benchmark in self.plan.questions
        }

    def summaries(self) -> dict[str, dict[str, Summary]]:
        """Each drafter in comparison with the base alone, by benchmark and drafter."""
        summaries = {}
        for benchmark, by_drafter in self.median_answers().items():
            baseline = next(iter(by_drafter))
            baseline_repeats = self.repeats(benchmark, baseline)
            summaries[benchmark] = {
                drafter: metrics.summarise(
                    answers,
                    by_drafter[baseline],
                    list(zip(self.repeats(benchmark, drafter), baseline_repeats, strict=True)),
                )
                for drafter, answers in by_drafter.items()
            }
        return summaries

    def repeat_differences(self) -> list[str]:
        """One line for each drafter whose repeats decode different tokens or steps."""
        lines = []
        for benchmark in self.plan.questions:
            for drafter in self.plan.drafters:
                first, *others = self.repeats(benchmark, drafter)
                with_steps = drafter not in self.plan.automatic
                ids = [
                    answer.question_id
                    for answer, *again in zip(first, *others, strict=True)
                    if any(without_times(other, with_steps) != without_times(answer, with_steps) for other in again)
                ]
                if ids:
                    lines.append(
                        f"{drafter} decodes {len(ids)} questions of {benchmark} differently in different repeats, "
                        f"question {ids[0]} first: decoding is not deterministic on this device"
                    )
        return lines

    def missing_turns(self) -> list[str]:
        """One line for each benchmark with later turns that no longer fitted into the base's context."""
        lines = []
        for benchmark, questions in self.plan.questions.items():
            answers = self.repeats(benchmark, next(iter(self.plan.drafters)))[0]
            pairs = zip(questions, answers, strict=True)
            if num_missing := sum(len(question.turns) - len(answer.turns) for question, answer in pairs):
                lines.append(f"{benchmark}: {num_missing} later turns, which no longer fit into the base's context")
        return lines


def is_precise(error: float | None) -> bool:
    """Whether a timing error is small enough that no repeat is added."""
    return error is not None and error <= PRECISION


def repeats_to_decode(folder: Path, plan: EvaluationPlan) -> Iterator[processes.Repeat]:
    """Yield each repeat and its benchmarks; whether another one is needed is decided when it is asked for.

    Args:
        folder: Folder of the journals.
        plan: What is decoded.
    """
    if plan.repeats != "auto":
        yield from ((repeat, list(plan.questions)) for repeat in range(plan.repeats))
        return
    benchmarks = list(plan.questions)
    for repeat in range(plan.max_repeats):
        if repeat:
            found = collect(folder, plan)
            benchmarks = [
                name for name in benchmarks if not all(map(is_precise, found.timing_errors(name, repeat).values()))
            ]
        if not benchmarks:
            return
        yield repeat, benchmarks


def collect(folder: Path, plan: EvaluationPlan) -> CollectedAnswers:
    """Read the journals of all processes.

    Args:
        folder: Folder of the journals.
        plan: What was decoded.
    """
    starts: list[tuple[float | None, int | None]] = []
    loads: list[float | None] = []
    collected = CollectedAnswers(plan)
    for number in range(len(plan.devices)):
        with Journal(processes.journal_path(folder, number), plan.settings, may_lack=NEW_SETTINGS) as journal:
            for key, answers in read_answers(journal).items():
                collected.answers.setdefault(key, {}).update(answers)
            own = list(journal.entries(_read_load))
        loads += [load for is_start, load, _ in own if not is_start]
        own_starts = [(load, gpu_use) for is_start, load, gpu_use in own if is_start]
        starts += own_starts
        collected.num_starts = max(collected.num_starts, len(own_starts))
    collected.machine = timing.MachineLoad(
        num_threads=plan.threads * len(plan.devices),
        num_cores=timing.num_cores(),
        before=_without_none(load for load, _ in starts),
        during=_without_none(loads),
        core_shares=_without_none(a.core_share for by_slot in collected.answers.values() for a in by_slot.values()),
        gpu_percents=_without_none(gpu_use for _, gpu_use in starts),
        num_again=sum(a.decodings - 1 for by_slot in collected.answers.values() for a in by_slot.values()),
    )
    return collected


def _read_load(entry: dict[str, Any]) -> tuple[bool, float | None, int | None]:
    """Whether an entry is that of a start, the load of the machine, and at a start the use of the GPU."""
    is_start = "answer" not in entry
    gpu_use = entry["gpu_use"] if is_start else None
    return validated(tuple[bool, float | None, int | None], (is_start, entry["load"], gpu_use))


def _without_none(values: Iterable[T | None]) -> list[T]:
    return [value for value in values if value is not None]
