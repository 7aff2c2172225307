"""An evaluation from its questions to its page: ask, append the answers, figures, tables, page."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from data.benchmarks import Question, find_benchmark, needs_package, score
from data.safe_text import SafeConsole
from data.templates import ReasoningMarks, with_date
from drafters.checks import check_at_least
from inference import drafter_specs, sandbox
from inference.evaluate import tables
from inference.evaluate.answers import RUN, AnswerFiles
from inference.evaluate.figures import reasoning
from inference.evaluate.own_loop import OwnLoop
from inference.evaluate.page import write_page
from inference.evaluate.results import EvaluationResults, write
from inference.journal import recorded_settings
from inference.options import EvaluationOptions, ModelOptions, QuestionOptions, SamplingOptions
from inference.prompts import BenchmarkPrompts, find_reasoning_marks
from inference.verifier.base import load_base_info


def evaluate(
    model: ModelOptions,
    selection: QuestionOptions,
    sampling: SamplingOptions,
    options: EvaluationOptions,
    out: str | None,
    overwrite: bool,
) -> None:
    """Run `drafters eval`, see `inference.commands.evaluate`."""
    check(options, sampling)
    questions = selection.load()
    has_programs = any(find_benchmark(name)[0].runs_code for name in questions)
    runs_code = options.run_code and has_programs
    if runs_code:
        sandbox.require()
    base = load_base_info(model.base)
    begun = recorded_settings(Path(out) / RUN) if out and not overwrite else {}
    template = with_date(selection.template, base.tokenizer, str(begun.get("template", "")))
    selection = replace(selection, template=template)
    prompts = selection.select(base, questions)

    source: Any
    if options.server:
        from inference.evaluate.server import Servers  # whose client takes a second to import

        source = Servers(model, selection, prompts, base, options)
    else:
        source = OwnLoop(model, selection, prompts, sampling, options)
    folder = Path(out) if out else None
    files = AnswerFiles(folder, asdict(source.conditions), overwrite)
    num_new = source.run(files)
    results = replace(source.results(files), name=folder.resolve().name if folder else "")
    files.finish()

    results = with_scores(results, prompts, runs_code, find_reasoning_marks(base, selection.template))
    if folder:  # written before anything is printed: a closed pipe (`... | head`) must not lose the results
        write(folder, results)
        rows = tables.figure_rows([results])
        tables.write_tables(folder / "results", ["md", "csv"], tables.markdown(results), [], rows)
        decode: Any = base.tokenizer.decode
        write_page(folder / "report.html", [(results, decode)], folder / "plots")
    SafeConsole().print(*tables.terminal(results), sep="\n")
    if ":" in results.conditions.template:  # with a switch, without which the figures cannot be reproduced
        print(f"Template: {results.conditions.template}")
    if has_programs and not options.run_code:
        print("pass@1 was not measured: --run_code runs the programs in the answers.")
    for package in {needs_package(name) for name in questions} - {""}:
        print(f"The answers were not scored: that needs {package}, pip install 'ctc-drafters[maths]'.")
    if folder:
        if not num_new:
            print(f"{out} already held every answer, so nothing was decoded; --overwrite measures again.")
        print(f"Report: {folder / 'report.html'}")


def check(options: EvaluationOptions, sampling: SamplingOptions) -> None:
    """Find mistakes that need neither a base nor a benchmark; raises ValueError."""
    sampling.sampler()
    for spec in options.drafter or [] if not options.server else []:
        _ = drafter_specs.split(spec).registration  # there is such a drafter
    most = options.disable_by_batch_size
    check_at_least(1, concurrency=min(options.concurrency or [1]), disable_by_batch_size=1 if most is None else most)
    if options.repeats != "auto":
        check_at_least(1, repeats=options.repeats)
    if options.server != ["vllm"] and most is not None:
        raise ValueError("--disable_by_batch_size is for vLLM: add --server vllm")
    if not options.server and options.concurrency:
        raise ValueError("--concurrency is for a server: add --server vllm or --server URL")
    if options.server and sampling.temperature:
        raise ValueError("--temperature is for our own decoding loop, not for --server")


def with_scores(
    results: EvaluationResults, prompts: Mapping[str, BenchmarkPrompts], runs_code: bool, marks: ReasoningMarks | None
) -> EvaluationResults:
    """Add the task quality of the answers, what was accepted in their reasoning, and what was cut or left out."""
    summaries: dict[str, dict[str, Any]] = {name: {} for name in results.summaries}
    warnings = list(results.record.warnings)
    left_out = [line for selected in prompts.values() for line in selected.notes()]
    for benchmark, by_drafter in results.summaries.items():
        questions = prompts[benchmark].questions
        begun = marks_of(questions, marks)
        for name, summary in by_drafter.items():
            answers = results.answers[benchmark][name]
            texts = [answer.turns[0].text for answer in answers]  # only first turns have a reference
            if begun:
                texts = [begun.without_reasoning(text) for text in texts]
            quality = score(benchmark, questions, texts, sandbox.finishes if runs_code else None)
            summaries[benchmark][name] = replace(summary, quality=quality, reasoning=reasoning(answers, begun))
        ended = [answer.turns[0].is_ended for answers in results.answers[benchmark].values() for answer in answers]
        if any(summary.quality for summary in summaries[benchmark].values()) and not all(ended):
            percent, cap = 100 * ended.count(False) / len(ended), results.conditions.caps[benchmark]
            warnings.append(f"{percent:.3g} % of the scored answers of {benchmark} were cut at {cap} tokens")
        pairs = zip(questions, next(iter(results.answers[benchmark].values())), strict=True)
        if missing := sum(len(question.turns) - len(answer.turns) for question, answer in pairs):
            left_out.append(f"{benchmark}: {missing} later turns, which no longer fit into the base's context")
    record = replace(results.record, ran_code=runs_code, left_out=left_out, warnings=warnings)
    return replace(results, summaries=summaries, record=record)


def marks_of(questions: Sequence[Question], marks: ReasoningMarks | None) -> ReasoningMarks | None:
    """The marks in the answers to these questions; a raw prompt passes through no template that would begin them."""
    is_raw = any(question.is_raw for question in questions)
    return replace(marks, is_open=False) if marks and is_raw else marks
