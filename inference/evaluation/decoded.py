"""All that the processes of an evaluation decoded, put together from their journals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inference.evaluation.answering import Place, outcome
from inference.evaluation.share import Plan, held
from inference.evaluation.workers import journal_path
from inference.results import metrics
from inference.results.metrics import Summary
from inference.results.records import Answer
from inference.runs import timing
from inference.runs.journal import Journal


@dataclass
class Decoded:
    """The answers of an evaluation, and what the machine was like.

    Args:
        plan: What was decoded.
        answers: By benchmark and repeat, by question and drafter.
        quiet: How quiet the machine was.
        starts: How often the command was begun until it was through.
    """

    plan: Plan
    answers: dict[tuple[str, int], dict[Place, Answer]] = field(default_factory=dict)
    quiet: timing.Quiet = field(default_factory=lambda: timing.Quiet(1, 1))
    starts: int = 0

    def repeats(self, benchmark: str, drafter: str) -> list[list[Answer]]:
        """A drafter's answers in the questions' order, of each repeat."""
        places = range(len(self.plan.questions[benchmark]))
        return [
            [self.answers[benchmark, repeat][place, drafter] for place in places] for repeat in range(self.plan.repeats)
        ]

    def middle(self) -> dict[str, dict[str, list[Answer]]]:
        """One answer to each question, by benchmark and drafter: of the repeats the one of `metrics.middle` time."""
        return {
            benchmark: {drafter: metrics.middle(self.repeats(benchmark, drafter)) for drafter in self.plan.drafters}
            for benchmark in self.plan.questions
        }

    def summaries(self) -> dict[str, dict[str, Summary]]:
        """Each drafter beside the base alone, by benchmark."""
        found = {}
        for benchmark, given in self.middle().items():
            alone = next(iter(given))
            base = self.repeats(benchmark, alone)
            found[benchmark] = {
                drafter: metrics.summarise(
                    answers, given[alone], list(zip(self.repeats(benchmark, drafter), base, strict=True))
                )
                for drafter, answers in given.items()
            }
        return found

    def unsteady(self) -> list[str]:
        """A line for each drafter whose repeats do not all decode alike."""
        lines = []
        for benchmark in self.plan.questions:
            for drafter in self.plan.drafters:
                first, *others = self.repeats(benchmark, drafter)
                places = [
                    answer.question_id
                    for answer, *again in zip(first, *others, strict=True)
                    if any(outcome(other) != outcome(answer) for other in again)
                ]
                if places:
                    lines.append(
                        f"{drafter} decodes {len(places)} questions of {benchmark} otherwise when they are repeated, "
                        f"question {places[0]} first: this device does not repeat itself"
                    )
        return lines

    def later_turns(self) -> list[str]:
        """A line for each benchmark of which later turns did not fit into the base's context any more."""
        lines = []
        for benchmark, asked in self.plan.questions.items():
            given = self.repeats(benchmark, next(iter(self.plan.drafters)))[0]
            if missing := sum(len(of.turns) - len(answer.turns) for of, answer in zip(asked, given, strict=True)):
                lines.append(f"{benchmark}: {missing} later turns, which no longer fit into the base's context")
        return lines


def read(folder: Path, plan: Plan, work: dict[str, Any]) -> Decoded:
    """Put the journals together.

    Args:
        folder: Of the journals.
        plan: What was decoded.
        work: `Plan.work`.
    """
    lines: list[dict[str, Any]] = []
    found = Decoded(plan)
    for number in range(len(plan.devices)):
        with Journal(journal_path(folder, number), work) as journal:
            lines += journal
            for key, answers in held(journal).items():
                found.answers.setdefault(key, {}).update(answers)
            found.starts = max(found.starts, sum("answer" not in line for line in journal))
    starts = [line for line in lines if "answer" not in line]
    given = [line for line in lines if "answer" in line]
    answers = [answer for of in found.answers.values() for answer in of.values()]
    found.quiet = timing.Quiet(
        plan.threads * len(plan.devices),
        timing.num_cores(),
        _known([line["load"] for line in starts]),
        _known([line["load"] for line in given]),
        _known([answer.core_share for answer in answers]),
        _known([line["gpu_use"] for line in starts]),
    )
    return found


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]
