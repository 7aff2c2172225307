"""The end of an evaluation: task quality, the results folder, and the tables in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data.benchmarks import Question, needs_code, needs_package
from data.files import SafeConsole, write_text
from data.templates import ReasoningMarks
from inference.evaluation.quality import quality_of
from inference.reporting import report
from inference.reporting.tables import COUNTING_RULE, Summaries
from inference.results import records
from inference.results.metrics import Summary
from inference.results.reasoning_figures import reasoning_figures
from inference.results.records import Answer
from inference.sandbox.sandbox import WEAK, Isolation, held_locks


@dataclass(frozen=True)
class Outcome:
    """What an evaluation found.

    Args:
        context: What was run, on which machine and how it was counted.
        benchmarks: What makes results comparable, by benchmark: see `EvaluationResults`.
        summaries: The numbers, by benchmark and drafter.
        answers: The answers, by benchmark and drafter.
        left_out: What was left out, one line each.
        warnings: What speaks against the numbers, one line each.
        isolation: What isolates the programs in the answers; None if they are not run.
        was_measured: Whether anything was measured now, rather than read from the results folder.
    """

    context: dict[str, str]
    benchmarks: Mapping[str, Mapping[str, Any]]
    summaries: Summaries
    answers: Mapping[str, Mapping[str, Sequence[Answer]]]
    left_out: Sequence[str]
    warnings: Sequence[str]
    isolation: Isolation | None = None
    was_measured: bool = True

    @property
    def sandbox(self) -> str | None:
        """What isolated the programs in the answers, if they were run."""
        return ", ".join(held_locks(self.isolation)) if self.isolation else None

    @property
    def all_warnings(self) -> list[str]:
        """The warnings, with one about a weak sandbox."""
        weak = f"the programs in the answers ran in a weak sandbox: {self.sandbox}"
        return [*self.warnings, *([weak] if self.isolation in WEAK else [])]


def graded(
    outcome: Outcome,
    questions: Mapping[str, Sequence[Question]],
    isolation: Isolation | None,
    marks: ReasoningMarks | None,
) -> dict[str, dict[str, Summary]]:
    """Return the summaries with the task quality of the answers, and what was accepted in their reasoning.

    Args:
        outcome: What was found.
        questions: The questions, by benchmark.
        isolation: What isolates the programs in the answers; None does not run them.
        marks: The marks of reasoning in the answers; None if there are none.
    """
    summaries: dict[str, dict[str, Summary]] = {}
    for benchmark, by_drafter in outcome.summaries.items():
        asked = questions[benchmark]
        own_marks = marks_of(asked, marks)
        summaries[benchmark] = {}
        for drafter, summary in by_drafter.items():
            answers = outcome.answers[benchmark][drafter]
            summaries[benchmark][drafter] = replace(
                summary,
                quality=quality_of(benchmark, asked, answers, isolation, own_marks),
                reasoning=None if summary.served else reasoning_figures(answers, own_marks),
            )
    return summaries


def marks_of(questions: Sequence[Question], marks: ReasoningMarks | None) -> ReasoningMarks | None:
    """The marks in the answers to these questions; a raw prompt passes through no template that would begin them."""
    is_raw = any(question.is_raw for question in questions)
    return replace(marks, is_open=False) if marks and is_raw else marks


def conclude(outcome: Outcome, folder: Path | None, decode: Callable[[list[int]], str]) -> None:
    """Write the results and print the tables.

    Args:
        outcome: What was found.
        folder: The results folder; None writes nothing.
        decode: Turns token ids into text.
    """
    # Written before anything is printed: a closed pipe (`... | head`) must not lose the results.
    page = write_results(folder, outcome, decode) if folder else None
    print_results(outcome)
    if ":" in outcome.context["template"]:  # with a switch, without which the figures cannot be reproduced
        print(f"Template: {outcome.context['template']}")
    if page:
        if not outcome.was_measured:
            print(f"{folder} already held every answer, so nothing was decoded; --overwrite measures again.")
        print(f"Report: {page}")


def write_results(folder: Path, outcome: Outcome, decode: Callable[[list[int]], str]) -> Path:
    """Write the answers, results.json, results.md and report.html; return the path of the report.

    Args:
        folder: The results folder.
        outcome: What was found.
        decode: Turns token ids into text.
    """
    context = outcome.context | ({"sandbox": outcome.sandbox} if outcome.sandbox else {})
    lines = (("left_out", outcome.left_out), ("warnings", outcome.all_warnings))
    context |= {key: "; ".join(own) for key, own in lines if own}
    written: set[Path] = set()
    for benchmark, by_drafter in outcome.answers.items():
        for drafter, own in by_drafter.items():
            path = folder / "answers" / benchmark / f"{_file_name(drafter)}.jsonl"
            while path in written:  # another drafter, whose name differs in such characters alone
                path = path.with_name(f"{path.stem}_.jsonl")
            records.write(path, own)
            written.add(path)
    for path in {*(folder / "answers").rglob("*.jsonl")} - written:  # of drafters that are no longer measured
        path.unlink()
    for path in (folder / "plots").glob("*.png"):  # of an earlier evaluation: they would be logged too
        path.unlink()
    report.write_results(folder, outcome.summaries, context, outcome.benchmarks)
    write_text(folder / "results.md", report.markdown(outcome.summaries, context))
    return report.write_report(folder, outcome.summaries, context, outcome.answers, decode)


def print_results(outcome: Outcome) -> None:
    """Print the tables, and what a reader must know about them."""
    console = SafeConsole()
    for table in report.table(outcome.summaries):
        console.print(table)
    console.print(COUNTING_RULE, style="dim")
    if outcome.sandbox:
        console.print(f"The programs in the answers ran in a sandbox of {outcome.sandbox}.")
    elif any(map(needs_code, outcome.summaries)):
        console.print("pass@1 was not measured: --allow-code-execution runs the programs in the answers.")
    if any(map(needs_package, outcome.summaries)):
        console.print(
            "Exact match was not measured: it needs math-verify, pip install 'ctc-drafters[maths]'.", markup=False
        )
    for line in outcome.left_out:
        console.print(f"left out: {line}", markup=False, highlight=False)
    for line in outcome.all_warnings:
        console.print(f"Warning: {line}.", style="yellow", markup=False)


def _file_name(drafter: str) -> str:
    return "".join(c if c.isalnum() or c in "._-=" else "_" for c in drafter)
