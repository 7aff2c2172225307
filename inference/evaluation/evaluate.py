"""``drafters eval``: measure several drafters side by side on the same questions."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from data.tokenizer import first_line
from inference import drafter_specs, timing
from inference.evaluation import processes
from inference.evaluation.collected import CollectedAnswers, collect, repeats_to_decode
from inference.evaluation.conclusion import Outcome, conclude, graded
from inference.evaluation.plan import EvaluationPlan
from inference.evaluation.quality import needs_code
from inference.evaluation.question_options import BenchmarkOptions
from inference.evaluation.results_folder import JOURNALS, delete_journals, describe_run, results_folder
from inference.evaluation.served.plan import ServerOptions
from inference.progress import progress_bars
from inference.prompts import BenchmarkPrompts, find_reasoning_marks
from inference.reporting.loggers import LoggerName, check_logger, log_evaluation, make_logger
from inference.sandbox.sandbox import choose_isolation
from inference.verifier.base import load_base_info, resolve_device
from inference.verifier.options import ModelOptions, SamplingOptions

OWN_LOOP = ServerOptions()  # which asks for no server
DEFAULT_DRAFTERS = ("none", "prompt_lookup", "joint")


@dataclass(frozen=True)
class EvaluationOptions:
    """How `drafters eval` measures.

    Args:
        drafter: NAME[=FILE][:key=value,...], such as joint, anpd:order=4 or ctc=FOLDER; an unknown name lists all of
            them. May be repeated. By default prompt_lookup and joint, which need no training. The base alone, none, is
            always measured too, as the baseline of the speed-up.
        typical: Accept drafts by Medusa's typical acceptance, which changes the distribution of the text; the base
            alone still samples exactly. Needs a temperature above 0.
        devices: Number of processes that share the questions, one on each GPU; auto uses all GPUs. A drafter that
            remembers earlier texts (joint, token_recycling, self_draft, ouroboros) then learns only from those of its
            own process and accepts less. Processes on one CPU disturb each other's times.
        repeats: How often every question is decoded. By default, auto, a benchmark is decoded again until the timing
            error of each speed-up is at most 5 %, which it may be after the first time; see --max-repeats.
        max_repeats: Maximum number of repeats with auto.
        allow_code_execution: Run the programs in the answers to humaneval, mbpp and their plus versions, to measure how
            many pass their tests. They run in a sandbox; inference/sandbox/sandbox.py says what it does not protect
            against.
        allow_weak_sandbox: Run them also where neither bubblewrap nor Landlock (Linux 6.2 or later) works. A Python
            audit hook is then all that keeps them from other files, and hostile programs can circumvent it.
        logger: Log the figures and plots also to tensorboard, wandb, mlflow or csv, below the folder of --out. wandb
            and mlflow need their own packages, and follow their own environment variables.
    """

    drafter: list[str] | None = None
    typical: bool = False
    devices: int | Literal["auto"] = 1
    repeats: int | Literal["auto"] = "auto"
    max_repeats: int = 5
    allow_code_execution: bool = False
    allow_weak_sandbox: bool = False
    logger: LoggerName | None = None


def evaluate(
    model: ModelOptions,
    selection: BenchmarkOptions,
    sampling: SamplingOptions,
    options: EvaluationOptions,
    server: ServerOptions = OWN_LOOP,
    out: str | None = None,
    overwrite: bool = False,
) -> None:
    """Decode the questions of benchmarks with several drafters and compare speed, acceptance length and text.

    With --engine vllm or --endpoint the answers come from a server, which is asked with several numbers of requests at
    once. Prints a table for each benchmark. With --out it also writes the answers as FastChat-style JSONL,
    results.json, results.md and report.html. An interrupted evaluation continues when the same command is run again;
    its results are those of an uninterrupted one, except for the times.

    Args:
        out: Folder for the results; by default nothing is written.
        overwrite: Start over and replace the results that the folder already holds.
    """
    check_options(sampling, options)
    server.check()
    if server.is_asked:
        from inference.evaluation import served_evaluation  # whose client takes a second to import

        served_evaluation.check(model, sampling, server, options_of_own_loop(options))
    _check_logger(options.logger, out)
    questions = selection.load()
    isolation = None
    if options.allow_code_execution and any(map(needs_code, questions)):
        isolation = choose_isolation(options.allow_weak_sandbox)
    reader = load_base_info(model.base)
    selected = selection.select(reader, questions)
    if server.is_asked:
        served = served_evaluation.make_plan(model, selection, selected, options.drafter, server)
        folder = results_folder(out, overwrite, served.settings)
        outcome = served_evaluation.measure(served, reader, server, folder, overwrite)
    else:
        plan = make_plan(model, selection, selected, sampling, options)
        folder = results_folder(out, overwrite, plan.settings)
        outcome = outcome_of(*decode(plan, folder, overwrite))
    left_out = [line for asked in selected.values() for line in asked.notes()]
    questions = {name: asked.questions for name, asked in selected.items()}
    summaries = graded(outcome, questions, isolation, find_reasoning_marks(reader, selection.template))
    outcome = replace(outcome, summaries=summaries, left_out=[*left_out, *outcome.left_out], isolation=isolation)
    to_text: Any = reader.tokenizer.decode
    conclude(outcome, folder, to_text)
    if options.logger and folder:
        try:
            logger = make_logger(options.logger, folder)
            log_evaluation(logger, outcome.summaries, outcome.context, folder / "plots")
        except Exception as error:  # each logger raises errors of its own
            raise ValueError(
                f"--logger {options.logger} failed ({first_line(error)}); the results are in {out}"
            ) from error


def check_options(sampling: SamplingOptions, options: EvaluationOptions) -> None:
    """Find mistakes that need neither a base nor a benchmark.

    Raises:
        ValueError: An option is out of range.
    """
    if options.typical and sampling.temperature == 0:
        raise ValueError("typical acceptance is a rule for sampling: give a --temperature above 0")
    if options.typical and any(drafter_specs.is_auto(spec) for spec in options.drafter or []):
        raise ValueError("typical acceptance is lossy, and with num_nodes=auto the text would depend on the clock")
    sampling.sampler()
    for name in ("repeats", "max_repeats", "devices"):
        if (number := getattr(options, name)) != "auto" and number < 1:
            raise ValueError(f"{name} must be at least 1, not {number}")


def options_of_own_loop(options: EvaluationOptions) -> dict[str, bool]:
    """Whether each option is used that a server does not have, by name."""
    return {
        "typical": options.typical,
        "devices": options.devices != 1,
        "repeats": options.repeats not in ("auto", 1),
    }


def _check_logger(name: LoggerName | None, out: str | None) -> None:
    if name is None:
        return
    if out is None:
        raise ValueError("--logger writes below the folder of the results: give --out FOLDER")
    check_logger(name)


def make_plan(
    model: ModelOptions,
    selection: BenchmarkOptions,
    selected: dict[str, BenchmarkPrompts],
    sampling: SamplingOptions,
    options: EvaluationOptions,
) -> EvaluationPlan:
    """Decide what is decoded, and on which devices.

    Raises:
        ValueError: A drafter is named twice, or there are fewer devices than asked for.
    """
    specs = [spec for spec in options.drafter or DEFAULT_DRAFTERS if spec != "none"]
    lossy = " (lossy)" if options.typical else ""
    devices = process_devices(resolve_device(model.device), options.devices)
    return EvaluationPlan(
        base=model.base,
        dtype=model.dtype,
        drafters={
            name if name == "none" else f"{name}{lossy}": spec
            for name, spec in drafter_specs.labels(["none", *specs]).items()
        },
        questions={name: asked.questions for name, asked in selected.items()},
        caps=selection.caps(),
        template=selection.template,
        sampling=sampling,
        typical=options.typical,
        devices=devices,
        threads=max(1, torch.get_num_threads() // len(devices)),
        repeats=options.repeats,
        packed=model.forward == "packed",
        max_repeats=options.max_repeats,
        compile=model.compile,
    )


def process_devices(device: torch.device, devices: int | Literal["auto"]) -> tuple[str, ...]:
    """The device of each process: one GPU each, or the CPU for all.

    Raises:
        ValueError: There are fewer GPUs than asked for.
    """
    if device.type != "cuda":
        return ("cpu",) * (1 if devices == "auto" else devices)
    num_gpus = torch.cuda.device_count()
    num_wanted = num_gpus if devices == "auto" else devices
    if num_wanted > num_gpus:
        raise ValueError(f"{num_wanted} --devices, but there are {num_gpus} GPUs here: give at most that many")
    return tuple(f"cuda:{index}" for index in range(num_wanted))


def decode(plan: EvaluationPlan, folder: Path | None, overwrite: bool) -> tuple[CollectedAnswers, int]:
    """Decode what the journals in the folder do not hold; return all answers, and how many were decoded now."""
    load = timing.running_threads()
    before = timing.MachineLoad(
        plan.threads * len(plan.devices), timing.num_cores(), [] if load is None else [load]
    ).warnings()
    num_decoded = 0
    with (
        tempfile.TemporaryDirectory() if folder is None else nullcontext(folder) as place,
        progress_bars() as bars,
    ):
        task = bars.add_task(", ".join(plan.questions), total=0)
        journals = Path(place) / JOURNALS

        def on_ready() -> None:
            for line in before:
                print(f"drafters eval: {line}; the measured times will be unreliable", file=sys.stderr)
            if folder and overwrite:
                delete_journals(folder)

        def on_answer(is_new: bool) -> None:
            nonlocal num_decoded
            num_decoded += is_new
            bars.advance(task)

        def repeats() -> Iterator[processes.Repeat]:
            total = 0
            for repeat, benchmarks in repeats_to_decode(journals, plan):
                total += plan.num_answers(benchmarks)
                bars.update(task, total=total)
                yield repeat, benchmarks

        processes.run(plan, journals, repeats(), on_ready, on_answer)
        return collect(journals, plan), num_decoded


def outcome_of(answers: CollectedAnswers, num_decoded: int) -> Outcome:
    """What an evaluation in our own decoding loop found."""
    plan = answers.plan
    prompts = plan.settings["questions"]
    return Outcome(
        context=describe_run(answers),
        benchmarks={name: {"prompts": prompts[name], "max_new_tokens": plan.caps[name]} for name in prompts},
        summaries=answers.summaries(),
        answers=answers.median_answers(),
        left_out=answers.missing_turns(),
        warnings=[*answers.machine.warnings(), *answers.imprecise_speedups(), *answers.repeat_differences()],
        was_measured=num_decoded > 0,
    )
