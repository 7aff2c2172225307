"""``drafters eval``: the same prompts with several drafters in one run, measured side by side."""

from __future__ import annotations

import platform
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import torch

from data import benchmarks
from inference.api.prompts import select_questions
from inference.engine.base import Dtype, load_base_info, resolve_device
from inference.engine.sampling import make_sampler
from inference.evaluation import workers
from inference.evaluation.answering import answer, answers
from inference.evaluation.decoded import Decoded, read
from inference.evaluation.quality import needs_code, quality_of
from inference.evaluation.share import Plan
from inference.registry import catalogue
from inference.reporting import report
from inference.reporting.tables import COUNTING_RULE
from inference.results import records
from inference.runs import timing
from inference.runs.journal import Journal
from inference.runs.outputs import new_folder

__all__ = ["answer", "answers", "evaluate"]

JOURNALS = "journal"  # the folder of what each process keeps as it goes
CALLED = {"caps": "max_new_tokens", "files": "files of the base or a drafter"}  # of the plan, by a user


def evaluate(
    base: str,
    drafter: list[str],
    benchmark: list[str],
    questions: list[str] | None = None,
    offset: int = 0,
    limit: int | None = None,
    spaced: bool = False,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    typical: bool = False,
    template: str = "tokenizer",
    dtype: Dtype = "float32",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    devices: int | Literal["auto"] = 1,
    repeats: int = 1,
    out: str | None = None,
    allow_code_execution: bool = False,
    overwrite: bool = False,
) -> None:
    """Decode the questions of benchmarks with several drafters and compare speed, acceptance and text.

    Prints a table; with --out also writes answers as FastChat-style JSONL, results.json, results.md and report.html.
    A run that was stopped goes on when the same command is given again, and ends in the numbers of one run; only times
    differ.

    Args:
        base: Folder or hub id of the base.
        drafter: NAME[=FILE][:key=value,...], such as joint, anpd:order=4 or ctc=FOLDER; a wrong name lists all; may be
            repeated. none, the base alone, is always run: all else is measured against it.
        benchmark: NAME or NAME:STYLE, such as mt_bench, gsm8k:ctc or cnn_dm:alpaca; a wrong name lists all; may be
            repeated.
        questions: A local file for each benchmark, in the same order, where it is not to come from the hub; wmt16 takes
            GERMAN,ENGLISH, a style with examples FILE,TRAIN_FILE, and '' leaves one to the hub, or to embedded.
        offset: Leave out the first questions of each benchmark.
        limit: Questions of each benchmark at most. Those whose prompts do not fit into the base's context are left out
            and named; they do not count.
        spaced: Take those of the limit evenly spaced, from all categories of a benchmark, and not its first.
        max_new_tokens: Tokens of an answer at most; each benchmark has its own from the papers.
        temperature: 0 decodes greedily, above it samples, each draw keyed by the seed and its position.
        top_k: Sampling keeps the k most probable tokens; 0 keeps all.
        top_p: Sampling keeps the most probable tokens up to this probability.
        seed: Of the sampling.
        typical: Accept drafts by Medusa's typical acceptance, which is lossy; the base alone still samples exactly.
        template: Chat template: the tokenizer's own, vicuna_v1.1 or llama2_chat.
        dtype: Number format of base and drafters.
        device: auto takes the GPU where there is one.
        devices: Processes that share the questions out, one on each GPU; auto takes all. A drafter that remembers
            earlier texts (joint, token_recycling, self_draft, ouroboros) then sees only those of its own process, and
            accepts less. Processes on one CPU disturb each other's times.
        repeats: How often all questions are decoded; the median time of each counts.
        out: Folder for the results.
        allow_code_execution: Run the programs in the answers to humaneval and mbpp, to tell how many pass their tests.
            They run in a sandbox; inference/sandbox/sandbox.py says what that is not.
        overwrite: Begin anew where results are already there.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    if typical and temperature == 0:
        raise ValueError("typical acceptance is a rule for sampling: give a --temperature above 0")
    make_sampler(temperature, top_k, top_p, seed)  # refuses what it cannot do before a base is loaded
    if repeated := [name for name in benchmark if benchmark.count(name) > 1]:
        raise ValueError(f"the benchmark {repeated[0]} is named twice")
    if repeats < 1 or (devices != "auto" and devices < 1):
        raise ValueError(f"repeats and devices must be at least 1, not {repeats} and {devices}")
    files = questions or []
    if files and len(files) != len(benchmark):
        raise ValueError(f"{len(files)} --questions for {len(benchmark)} --benchmark: give one file for each, in order")
    benchmarks.check_selection(offset, limit)
    if spaced and limit is None:
        raise ValueError("--spaced says which questions of a --limit are taken: give one")
    loaded = {
        name: benchmarks.load(name, file or None, offset)
        for name, file in zip(benchmark, files or [None] * len(benchmark), strict=True)
    }
    caps = {name: benchmarks.length_cap(name) if max_new_tokens is None else max_new_tokens for name in loaded}
    reader = load_base_info(base)
    fit = {
        name: select_questions(reader, name, every, template, caps[name], limit, spaced)
        for name, every in loaded.items()
    }
    asked = {name: found.questions for name, found in fit.items()}
    chosen = _devices(resolve_device(device), devices)
    specs = catalogue.labels(["none", *(spec for spec in drafter if spec != "none")])
    plan = Plan(
        base=base,
        drafters={f"{name} (lossy)" if typical and name != "none" else name: spec for name, spec in specs.items()},
        questions=asked,
        caps=caps,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        typical=typical,
        template=template,
        dtype=dtype,
        devices=chosen,
        threads=max(1, torch.get_num_threads() // len(chosen)),
        repeats=repeats,
    )
    work = plan.work()
    folder = _results_folder(out, overwrite, work)
    num_answers = repeats * len(plan.drafters) * sum(map(len, asked.values()))
    busy = timing.Quiet(plan.threads * len(chosen), timing.num_cores(), _loads()).warnings()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    num_new = 0
    with (
        tempfile.TemporaryDirectory() if folder is None else nullcontext(folder) as place,
        Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress,
    ):
        task = progress.add_task(", ".join(asked), total=num_answers)

        def advance(is_new: bool) -> None:
            nonlocal num_new
            num_new += is_new
            progress.advance(task)

        def begin() -> None:
            for line in busy:
                print(f"drafters eval: {line}: times will be worth little", file=sys.stderr)
            if folder and overwrite:
                _clear(folder)

        journals = Path(place) / JOURNALS
        workers.run(plan, work, journals, begin, advance)
        decoded = read(journals, plan, work)
    given = decoded.middle()
    summaries = {
        name: {
            each: replace(summary, quality=quality_of(name, asked[name], given[name][each], allow_code_execution))
            for each, summary in by_drafter.items()
        }
        for name, by_drafter in decoded.summaries().items()
    }
    warnings = [*decoded.quiet.warnings(), *decoded.unsteady()]
    console = Console()
    for table in report.table(summaries):
        console.print(table)
    console.print(COUNTING_RULE, style="dim")
    if not allow_code_execution and any(map(needs_code, asked)):
        console.print("pass@1 was not measured: --allow-code-execution runs the programs that were written.")
    left_out = [line for found in fit.values() for line in found.notes()] + decoded.later_turns()
    for line in left_out:
        console.print(f"left out: {line}", markup=False, highlight=False)
    for line in warnings:
        console.print(f"Warning: {line}.", style="yellow")
    if folder:
        if not num_new:
            console.print(f"{out} held every answer already: nothing was decoded; --overwrite measures anew.")
        context = _context(plan, decoded)
        context |= {key: "; ".join(said) for key, said in (("left_out", left_out), ("warnings", warnings)) if said}
        for name, by_drafter in given.items():
            for each, found in by_drafter.items():
                records.write(folder / "answers" / name / f"{_file_name(each)}.jsonl", found)
        report.write_results(folder, summaries, context)
        (folder / "results.md").write_text(report.markdown(summaries, context), encoding="utf-8")
        page = report.write_report(folder, summaries, context, given, reader.tokenizer.decode)
        console.print(f"Report: {page}")


def _results_folder(out: str | None, overwrite: bool, work: dict[str, Any]) -> Path | None:
    """The folder of the results, if any; what was begun there with other arguments stays as it is."""
    kept = sorted((Path(out) / JOURNALS).glob("*.jsonl")) if out else []
    folder = new_folder(out, overwrite or bool(kept))
    if not overwrite:
        for path in kept:
            try:
                with Journal(path, work, labels=CALLED):
                    pass
            except ValueError as error:
                raise ValueError(f"{out} already holds results: {error}") from error
    return folder


def _clear(folder: Path) -> None:
    """Make room for new results, once nothing in the arguments can stop them any more."""
    old = [*(folder / "answers").rglob("*.jsonl"), *(folder / JOURNALS).glob("*.jsonl")]
    for path in [*old, folder / "results.json", folder / "results.md"]:
        path.unlink(missing_ok=True)


def _devices(device: torch.device, devices: int | Literal["auto"]) -> tuple[str, ...]:
    """The device of each process: GPUs one by one, or the CPU for all."""
    if device.type != "cuda":
        return ("cpu",) * (1 if devices == "auto" else devices)
    present = torch.cuda.device_count()
    wanted = present if devices == "auto" else devices
    if wanted > present:
        raise ValueError(f"{wanted} --devices, but there are {present} GPUs here: give at most so many")
    return tuple(f"cuda:{index}" for index in range(wanted))


def _loads() -> list[float]:
    found = timing.running()
    return [] if found is None else [found]


def _file_name(drafter: str) -> str:
    return "".join(c if c.isalnum() or c in "._-=" else "_" for c in drafter)


def _context(plan: Plan, decoded: Decoded) -> dict[str, str]:
    import transformers

    first = torch.device(plan.devices[0])
    machine = torch.cuda.get_device_name(first) if first.type == "cuda" else platform.processor() or platform.machine()
    several = f"{len(plan.devices)} x " if len(plan.devices) > 1 else ""
    how = "greedy"
    if plan.temperature:
        how = f"temperature {plan.temperature}, top_k {plan.top_k}, top_p {plan.top_p}, seed {plan.seed}"
    if plan.typical:
        how += ", drafts accepted by typical acceptance: lossy"
    caps = set(plan.caps.values())
    cap = str(*caps) if len(caps) == 1 else ", ".join(f"{cap} ({name})" for name, cap in plan.caps.items())
    return {
        "base": plan.base,
        "dtype": plan.dtype,
        "device": f"{several}{first.type} ({machine}, {plan.threads} threads)",
        "decoding": f"{how}, at most {cap} new tokens a turn",
        "template": plan.template,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": " ".join(["drafters", *sys.argv[1:]]),
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        "timing": f"every question decoded {plan.repeats} times, the middle time counts"
        if plan.repeats > 1
        else "every question decoded once",
        "machine": decoded.quiet.told(),
        "counting": COUNTING_RULE,
    } | ({"starts": f"{decoded.starts}: the command was stopped and went on"} if decoded.starts > 1 else {})
