"""The results folder of an evaluation: answers, results.json, results.md, report.html and the journals."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

from data.files.atomic_write import write_text
from inference.evaluation.collected import PRECISION, CollectedAnswers
from inference.evaluation.plan import LABELS, EvaluationPlan
from inference.reporting import report
from inference.reporting.tables import COUNTING_RULE, Summaries
from inference.results import records
from inference.runs.journal import Journal
from inference.runs.outputs import new_folder

JOURNALS = "journal"  # name of the folder with a journal for each process


def results_folder(out: str | None, overwrite: bool, plan: EvaluationPlan) -> Path | None:
    """Return the folder for the results, or None if no folder was chosen.

    Raises:
        ValueError: The folder cannot be created, or it holds results of other settings and must not be overwritten.
    """
    journals = sorted((Path(out) / JOURNALS).glob("*.jsonl")) if out else []
    folder = new_folder(out, overwrite or bool(journals))
    if not overwrite:
        for path in journals:
            try:
                Journal(path, plan.settings, labels=LABELS)
            except ValueError as error:
                raise ValueError(f"{out} already holds results: {error}") from error
    return folder


def delete_journals(folder: Path) -> None:
    """Delete the journals of an earlier evaluation; its results stay until `write_results` replaces them."""
    for path in (folder / JOURNALS).glob("*.jsonl"):
        path.unlink()


def write_results(
    folder: Path,
    answers: CollectedAnswers,
    summaries: Summaries,
    skipped: Sequence[str],
    warnings: Sequence[str],
    decode: Callable[[list[int]], str],
    sandbox: str | None = None,
) -> Path:
    """Write the answers, results.json, results.md and report.html; return the path of the report.

    Args:
        folder: The results folder.
        answers: All answers.
        summaries: The numbers, by benchmark and drafter.
        skipped: What was left out, one line each.
        warnings: What speaks against the numbers, one line each.
        decode: Turns token ids into text.
        sandbox: What isolated the programs in the answers, if they were run.
    """
    context = describe_run(answers) | ({"sandbox": sandbox} if sandbox else {})
    context |= {key: "; ".join(lines) for key, lines in (("left_out", skipped), ("warnings", warnings)) if lines}
    given = answers.median_answers()
    written = set()
    for benchmark, by_drafter in given.items():
        for drafter, own in by_drafter.items():
            path = folder / "answers" / benchmark / f"{_file_name(drafter)}.jsonl"
            records.write(path, own)
            written.add(path)
    for path in {*(folder / "answers").rglob("*.jsonl")} - written:  # of drafters that are no longer measured
        path.unlink()
    prompts, caps = answers.plan.settings["questions"], answers.plan.caps
    benchmarks = {name: {"prompts": prompts[name], "max_new_tokens": caps[name]} for name in prompts}
    report.write_results(folder, summaries, context, benchmarks)
    write_text(folder / "results.md", report.markdown(summaries, context))
    return report.write_report(folder, summaries, context, given, decode)


def describe_run(answers: CollectedAnswers) -> dict[str, str]:
    """What was run, on which machine and how it was counted: the context of the results."""
    import transformers

    plan = answers.plan
    device = torch.device(plan.devices[0])
    is_gpu = device.type == "cuda"
    machine = torch.cuda.get_device_name(device) if is_gpu else platform.processor() or platform.machine()
    count = f"{len(plan.devices)} x " if len(plan.devices) > 1 else ""
    context = {
        "base": plan.base,
        "dtype": f"{plan.dtype}, packed weights" if plan.packed else plan.dtype,
        "device": f"{count}{device.type} ({machine}, {plan.threads} threads{', compiled steps' * plan.compile})",
        "decoding": _describe_decoding(plan),
        "template": plan.template,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": " ".join(["drafters", *sys.argv[1:]]),
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        "timing": _describe_timing(answers),
        "machine": answers.machine.describe(),
        "counting": COUNTING_RULE,
    }
    if plan.automatic:
        context["budget"] = f"automatic, so acceptance depends on times: {', '.join(plan.automatic)}"
    if answers.num_starts > 1:
        context["starts"] = f"{answers.num_starts}: the command was interrupted and continued"
    return context


def _describe_timing(answers: CollectedAnswers) -> str:
    plan = answers.plan
    counts = {benchmark: answers.num_repeats(benchmark) for benchmark in plan.questions}
    times = ["once" if count == 1 else f"{count} times" for count in counts.values()]
    each = ", ".join(f"{time} ({name})" for name, time in zip(counts, times, strict=True))
    text = f"every question decoded {times[0] if len(set(times)) == 1 else each}"
    if plan.repeats == "auto":
        text += f" (until timing leaves at most {100 * PRECISION:.0f} % of a speed-up open, at most {plan.max_repeats})"
    return text


def _describe_decoding(plan: EvaluationPlan) -> str:
    sampling = plan.sampling
    decoding = "greedy"
    if sampling.temperature:
        decoding = (
            f"temperature {sampling.temperature}, top_k {sampling.top_k}, top_p {sampling.top_p}, seed {sampling.seed}"
        )
    if plan.typical:
        decoding += ", drafts accepted by typical acceptance: lossy"
    caps = set(plan.caps.values())
    cap = str(*caps) if len(caps) == 1 else ", ".join(f"{cap} ({name})" for name, cap in plan.caps.items())
    return f"{decoding}, at most {cap} new tokens a turn"


def _file_name(drafter: str) -> str:
    return "".join(c if c.isalnum() or c in "._-=" else "_" for c in drafter)
