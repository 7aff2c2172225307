"""``drafters eval``: measure several drafters side by side on the same questions."""

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from data.benchmarks import Question, find_benchmark, needs_package, score
from data.safe_text import SafeConsole
from data.templates import ReasoningMarks, with_date
from inference import sandbox, timing
from inference.evaluate import run as own_loop
from inference.evaluate import tables
from inference.evaluate.breakdowns import reasoning
from inference.evaluate.page import Decode, write_page
from inference.evaluate.plan import EvaluationOptions, EvaluationPlan, RunConditions, make_plan
from inference.evaluate.report import figures, write_tables
from inference.evaluate.results import EvaluationResults, Run, RunRecord, write
from inference.journal import Journal
from inference.prompts import BenchmarkPrompts, QuestionOptions, find_reasoning_marks
from inference.runs import LoggedProgress, folder_above, progress_bars
from inference.verifier.base import BaseConfig, load_base_info
from inference.verifier.options import ModelOptions, SamplingOptions

WRITES = "answers", "plots", "results.json", "results.csv", "results.md", "report.html"


def evaluate(
    model: ModelOptions,
    selection: QuestionOptions,
    sampling: SamplingOptions,
    options: EvaluationOptions,
    out: str | None = None,
    overwrite: bool = False,
) -> None:
    """Decode the questions of benchmarks with several drafters and compare speed, acceptance length and text.

    With --server the answers come from a server, which is asked with several numbers of requests at once. Prints a
    table for each benchmark. With --out it also writes the answers as FastChat-style JSONL, results.json, results.csv,
    results.md and report.html. An interrupted evaluation continues when the same command is run again; its results are
    those of an uninterrupted one, except for the times.

    Args:
        out: Folder for the results; by default nothing is written.
        overwrite: Start over and replace the results that the folder already holds.
    """
    options.check(sampling)
    questions = selection.load()
    has_programs = any(find_benchmark(name)[0].runs_code for name in questions)
    runs_code = options.run_code and has_programs
    if runs_code:
        sandbox.require()
    base = load_base_info(model.base)
    selection = replace(selection, template=with_date(selection.template, base.tokenizer))
    prompts = selection.select(base, questions)
    if options.server:
        results, num_new = _ask(model, selection, prompts, base, options, out, overwrite)
    else:
        plan = make_plan(model, selection, prompts, sampling, options)
        results, num_new = decode(plan, results_folder(out, overwrite, plan.conditions), overwrite)
    results = with_scores(results, prompts, runs_code, find_reasoning_marks(base, selection.template))
    to_text: Any = base.tokenizer.decode
    finish(results, Path(out) if out else None, to_text)
    if has_programs and not options.run_code:
        print("pass@1 was not measured: --run_code runs the programs in the answers.")
    for package in {needs_package(name) for name in questions} - {""}:
        print(f"The answers were not scored: that needs {package}, pip install 'ctc-drafters[maths]'.")
    if out:
        if not num_new:
            print(f"{out} already held every answer, so nothing was decoded; --overwrite measures again.")
        print(f"Report: {Path(out) / 'report.html'}")


def results_folder(out: str | None, overwrite: bool, conditions: RunConditions) -> Path | None:
    """Return the folder for the results, or None if no folder was chosen.

    Raises ValueError if it cannot be created, or holds results under other conditions or without a journal.
    """
    if out is None:
        return None
    folder = Path(out)
    folder_above(folder / "results.json")
    journal = folder / own_loop.JOURNAL
    if not journal.exists() and (replaced := journal.with_suffix(".old")).exists():
        replaced.rename(journal)  # the run that was to replace it ended without an answer
    if not overwrite and journal.exists():
        Journal(journal, asdict(conditions))
    elif not overwrite and (names := [name for name in WRITES if (folder / name).exists()]):
        raise ValueError(f"{out} already holds {', '.join(names)}: give another --out, or --overwrite to replace them")
    return folder


@contextmanager
def _place(folder: Path | None, overwrite: bool) -> Iterator[tuple[Path, LoggedProgress]]:
    """The journal, in a temporary folder if no results are kept, and progress bars.

    A journal that is replaced is set aside until the block has ended.
    """
    with tempfile.TemporaryDirectory() if folder is None else nullcontext(folder) as place, progress_bars() as bars:
        journal = Path(place) / own_loop.JOURNAL
        if overwrite and journal.exists():
            journal.rename(journal.with_suffix(".old"))
        yield journal, bars
        journal.with_suffix(".old").unlink(missing_ok=True)


def decode(plan: EvaluationPlan, folder: Path | None, overwrite: bool = False) -> tuple[EvaluationResults, int]:
    """Decode what the journal in the folder does not hold; return the results and the number of new answers."""
    load, num_threads = timing.running_threads(), plan.conditions.threads or 1
    before = timing.MachineLoad(timing.num_cores(), num_threads, [] if load is None else [load])
    with _place(folder, overwrite) as (journal, bars):
        task = bars.add_task(", ".join(plan.questions), total=0)

        def repeats() -> Iterator[own_loop.Repeat]:  # once everything is loaded
            for line in before.warnings():
                print(f"drafters eval: {line}; the measured times will be unreliable", file=sys.stderr)
            total = 0
            for repeat, benchmarks in own_loop.repeats_to_decode(journal, plan):
                total += plan.num_answers(benchmarks)
                bars.update(task, total=total)
                yield repeat, benchmarks

        num_new = 0
        for is_new in own_loop.run(plan, journal, repeats()):
            num_new += is_new
            bars.advance(task)
        found = own_loop.collect(journal, plan)
    num_repeats = {benchmark: found.num_repeats(benchmark) for benchmark in plan.questions}
    record = RunRecord(
        found.load, num_repeats, found.num_starts, warnings=found.warnings(), row_multiple=found.row_multiple
    )
    run = Run(plan.conditions, record)
    return EvaluationResults("", {"": run}, found.summaries(), found.median_answers()), num_new


def _ask(
    model: ModelOptions,
    selection: QuestionOptions,
    prompts: Mapping[str, BenchmarkPrompts],
    base: BaseConfig,
    options: EvaluationOptions,
    out: str | None,
    overwrite: bool,
) -> tuple[EvaluationResults, int]:
    """Ask servers what the journal in the folder does not hold; return the results, and how many answers are there."""
    from inference.evaluate import server  # whose client takes a second to import

    levels = sorted(set(options.concurrency or server.DEFAULT_LEVELS))
    if few := [name for name, own in prompts.items() if len(own.questions) < levels[-1]]:
        raise ValueError(f"{levels[-1]} requests at once need as many questions, and {few[0]} has fewer: raise --limit")
    conditions = server.make_conditions(model, selection, prompts, options)
    total = len(conditions.drafters) * len(levels) * sum(len(own.questions) for own in prompts.values())
    with _place(results_folder(out, overwrite, conditions), overwrite) as (journal, bars):
        task = bars.add_task(", ".join(prompts), total=total)
        advance = partial(bars.advance, task)
        runs, notes = server.measure(conditions, base, prompts, levels, journal, advance)
    summaries, warnings = server.summarise(runs, conditions)
    answers: dict[str, dict[str, Any]] = {name: {} for name in prompts}
    for (benchmark, drafter, level), run in runs.items():
        answers[benchmark][f"{drafter} @ {level}"] = run.answers
    record = RunRecord(repeats=dict.fromkeys(prompts, 1), warnings=[*notes, *warnings])
    return EvaluationResults("", {"": Run(conditions, record)}, summaries, answers), total


def with_scores(
    results: EvaluationResults, prompts: Mapping[str, BenchmarkPrompts], runs_code: bool, marks: ReasoningMarks | None
) -> EvaluationResults:
    """Add the task quality of the answers, what was accepted in their reasoning, and what was left out."""
    summaries: dict[str, dict[str, Any]] = {name: {} for name in results.summaries}
    left_out = [line for own in prompts.values() for line in own.notes()]
    for benchmark, by_drafter in results.summaries.items():
        asked = prompts[benchmark].questions
        own_marks = marks_of(asked, marks)
        for name, summary in by_drafter.items():
            answers = results.answers[benchmark][name]
            texts = [answer.turns[0].text for answer in answers]  # only first turns have a reference
            if own_marks:
                texts = [own_marks.without_reasoning(text) for text in texts]
            quality = score(benchmark, asked, texts, sandbox.finishes if runs_code else None)
            inside = None if summary.latency else reasoning(answers, own_marks)
            summaries[benchmark][name] = replace(summary, quality=quality, reasoning=inside)
        pairs = zip(asked, next(iter(results.answers[benchmark].values())), strict=True)
        if missing := sum(len(question.turns) - len(answer.turns) for question, answer in pairs):
            left_out.append(f"{benchmark}: {missing} later turns, which no longer fit into the base's context")
    ((name, run),) = results.runs.items()
    record = replace(run.run, ran_code=runs_code, left_out=left_out)
    return replace(results, summaries=summaries, runs={name: replace(run, run=record)})


def marks_of(questions: list[Question], marks: ReasoningMarks | None) -> ReasoningMarks | None:
    """The marks in the answers to these questions; a raw prompt passes through no template that would begin them."""
    is_raw = any(question.is_raw for question in questions)
    return replace(marks, is_open=False) if marks and is_raw else marks


def finish(results: EvaluationResults, folder: Path | None, decode: Decode) -> None:
    """Write the results, if there is a folder for them, and print the tables."""
    if folder:  # written before anything is printed: a closed pipe (`... | head`) must not lose the results
        results = replace(results, name=folder.resolve().name)
        write(folder, results)
        write_tables(folder / "results", ["md", "csv"], tables.markdown(results), [], figures([results]))
        write_page(folder / "report.html", [(results, decode)], folder / "plots")
    SafeConsole().print(*tables.terminal(results), sep="\n")
    if ":" in results.conditions.template:  # with a switch, without which the figures cannot be reproduced
        print(f"Template: {results.conditions.template}")
