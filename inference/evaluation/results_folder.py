"""The results folder of an evaluation: its journals, and what its results say about the run."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from inference import drafter_specs
from inference.evaluation.collected import PRECISION, CollectedAnswers
from inference.evaluation.plan import LABELS, NEW_SETTINGS, EvaluationPlan
from inference.journal import Journal
from inference.outputs import new_folder
from inference.reporting.tables import COUNTING_RULE
from inference.results.conditions import LENGTH_CAP, describe_caps, describe_fingerprints

JOURNALS = "journal"  # name of the folder with a journal for each process


def results_folder(out: str | None, overwrite: bool, settings: Mapping[str, Any]) -> Path | None:
    """Return the folder for the results, or None if no folder was chosen.

    Args:
        out: The folder.
        overwrite: Whether results that it holds are replaced.
        settings: Everything that the results depend on: the first line of the journals.

    Raises:
        ValueError: The folder cannot be created, or it holds results of other settings and must not be overwritten.
    """
    journals = sorted((Path(out) / JOURNALS).glob("*.jsonl")) if out else []
    folder = new_folder(out, overwrite or bool(journals))
    if not overwrite:
        for path in journals:
            try:
                Journal(path, settings, labels=LABELS, may_lack=NEW_SETTINGS)
            except ValueError as error:
                raise ValueError(f"{out} already holds results: {error}") from error
    return folder


def delete_journals(folder: Path) -> None:
    """Delete the journals of an earlier evaluation; its results stay until new ones replace them."""
    for path in (folder / JOURNALS).glob("*.jsonl"):
        path.unlink()


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
        LENGTH_CAP: describe_caps(plan.caps),
        "template": plan.template,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": " ".join(["drafters", *sys.argv[1:]]),
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        "timing": _describe_timing(answers),
        "machine": answers.machine.describe(),
        "counting": COUNTING_RULE,
        **fingerprints(plan.settings),
    }
    if plan.automatic:
        context["budget"] = f"automatic, so acceptance depends on times: {', '.join(plan.automatic)}"
    if answers.num_starts > 1:
        context["starts"] = f"{answers.num_starts}: the command was interrupted and continued"
    return context


def fingerprints(settings: Mapping[str, Any]) -> dict[str, str]:
    """The fingerprints of the base and of the drafters' files, from the settings of a plan, as lines of the context."""
    files = settings["files"]
    specs = {name: spec for name, spec in settings["drafters"].items() if "://" not in spec}
    own = {name: files.get(drafter_specs.split(spec)[1], "") for name, spec in specs.items()}
    return describe_fingerprints(files[settings["base"]], own)


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
    return decoding
