"""``drafters eval --engine vllm`` and ``--endpoint``: an evaluation whose answers come from a server."""

from __future__ import annotations

import platform
import sys
import tempfile
from contextlib import closing, nullcontext
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from inference import timing
from inference.evaluation.conclusion import Outcome
from inference.evaluation.question_options import BenchmarkOptions
from inference.evaluation.results_folder import JOURNALS, delete_journals, fingerprints
from inference.evaluation.served.arms import JOURNAL, OpenServer, ServedRuns, endpoint, measure_all, vllm
from inference.evaluation.served.client import OWN_SERVER, ServerClient
from inference.evaluation.served.plan import BASELINE, SERVER, ServedPlan, ServerOptions, vllm_arms
from inference.progress import progress_bars
from inference.prompts import BenchmarkPrompts
from inference.reporting.tables import COUNTING_RULE
from inference.results.conditions import LENGTH_CAP, describe_caps
from inference.verifier.base import QUANTIZED_DTYPES, BaseConfig
from inference.verifier.options import ModelOptions, SamplingOptions
from inference.vllm.command import installed_vllm

ENGINES = {OWN_SERVER: "drafters serve", "vllm": "vLLM"}  # by who owns a server's model
LOGS = "logs"  # name of the folder with the output of each server that was started


def check(model: ModelOptions, sampling: SamplingOptions, server: ServerOptions, others: dict[str, bool]) -> None:
    """Find mistakes that need neither a base nor a benchmark.

    Args:
        model: The base.
        sampling: How the next token is chosen.
        server: The server.
        others: Whether each option that is for our own decoding loop alone is used, by its name.

    Raises:
        ValueError: An option is out of range, or does not go with a server.
    """
    server.check()
    if sampling.temperature:
        raise ValueError("servers are measured with greedy decoding, for comparable texts: leave --temperature out")
    others = others | {f"forward {model.forward}": model.forward != "eager"}
    if used := [name for name, is_used in others.items() if is_used]:
        raise ValueError(f"--{used[0]} is for our own decoding loop: leave it out with --engine or --endpoint")
    if server.engine and model.dtype in QUANTIZED_DTYPES:
        raise ValueError(f"vLLM has no dtype {model.dtype}: pass float32, bfloat16 or float16")


def make_plan(
    model: ModelOptions,
    selection: BenchmarkOptions,
    selected: dict[str, BenchmarkPrompts],
    drafters: list[str] | None,
    server: ServerOptions,
) -> ServedPlan:
    """Decide what is measured.

    Raises:
        ValueError: vLLM cannot serve a drafter, an endpoint does not answer, or there are fewer questions than requests
            at once.
    """
    remembering: frozenset[str] = frozenset()
    models: tuple[str, ...] = ()
    switches_drafter = False
    if server.engine:
        engine = f"vLLM {installed_vllm()[1]}"
        arms, remembering = vllm_arms(model.base, drafters, model.dtype)
    elif drafters:
        raise ValueError("an --endpoint has the drafter that it was started with: leave --drafter out")
    else:
        engine, arms, models = _endpoint_arms(server)
        switches_drafter = len(arms) > len(models)
    return ServedPlan(
        base=model.base,
        dtype=model.dtype if server.engine else "of the server",
        engine=engine,
        arms=arms,
        questions={name: asked.questions for name, asked in selected.items()},
        prompts={name: asked.prompts for name, asked in selected.items()},
        caps=selection.caps(),
        template=selection.template,
        concurrency=server.levels,
        engine_args=tuple(server.engine_arguments()),
        remembering=remembering,
        models=models,
        switches_drafter=switches_drafter,
    )


def _endpoint_arms(server: ServerOptions) -> tuple[str, dict[str, str], tuple[str, ...]]:
    """The engines, the addresses by name, and what is served; a server of ours decodes without its drafter too."""
    arms, models = server.endpoints(), []
    for url in arms.values():
        with closing(ServerClient(url, server.api_key_env)) as client:
            model = client.model()
            models.append(replace(model, name=client.without_key(model.name)))
    engine = " and ".join(dict.fromkeys(ENGINES.get(model.owner, "a server") for model in models))
    served = tuple(" ".join(filter(None, [model.owner, model.name, model.drafter])) for model in models)
    if len(arms) == 1 and models[0].owner == OWN_SERVER:
        ((given, url),) = arms.items()
        names = given if given != SERVER else None, models[0].drafter, SERVER
        name = next(name for name in names if name and name != BASELINE)
        return engine, {BASELINE: url, name: url}, served
    return engine, arms, served


def measure(plan: ServedPlan, base: BaseConfig, server: ServerOptions, folder: Path | None, overwrite: bool) -> Outcome:
    """Measure all arms, or those that the folder does not hold.

    Args:
        plan: What is measured.
        base: The base, for the prompts.
        server: The server.
        folder: The results folder; None keeps nothing.
        overwrite: Whether everything is measured again.
    """
    num_questions = sum(map(len, plan.questions.values())) * len(plan.concurrency)
    num_new = 0
    with (
        tempfile.TemporaryDirectory() if folder is None else nullcontext(folder) as place,
        progress_bars() as bars,
    ):
        task = bars.add_task(", ".join(plan.questions), total=num_questions * len(plan.arms))
        open_server: OpenServer = partial(endpoint, plan, base, server.api_key_env)
        if server.engine:
            open_server = partial(vllm, plan, base, Path(place) / LOGS, folder is not None)

        def on_ready() -> None:
            nonlocal num_new
            num_new = 1
            if folder and overwrite:
                delete_journals(folder)

        journal = Path(place) / JOURNALS / JOURNAL
        found = measure_all(
            plan, base, journal, overwrite, open_server, on_ready, lambda count: bars.advance(task, count)
        )
    prompts = plan.settings["questions"]
    machine = timing.MachineLoad(timing.num_cores(), timing.num_cores(), found.loads)
    is_ours = bool(server.engine)
    return Outcome(
        context=_describe(found, machine, is_ours),
        benchmarks={name: {"prompts": prompts[name], "max_new_tokens": plan.caps[name]} for name in prompts},
        summaries=found.summaries(),
        answers=found.answers(),
        left_out=_missing_turns(found),
        warnings=[*(machine.warnings() if is_ours else []), *found.notes, *found.baseline_differences()],
        was_measured=bool(num_new),
    )


def _describe(found: ServedRuns, machine: timing.MachineLoad, is_ours: bool) -> dict[str, str]:
    """What was run, where and how it was counted."""
    plan = found.plan
    place = f"this machine ({platform.processor() or platform.machine()}, {machine.num_cores} cores)"
    if not is_ours:
        hosts = dict.fromkeys(urlsplit(url).netloc for url in plan.arms.values())
        place = ", ".join(hosts)
    return {
        "base": plan.base,
        "engine": plan.engine,
        "dtype": plan.dtype,
        "device": f"{plan.engine} on {place}",
        "decoding": "greedy",
        LENGTH_CAP: describe_caps(plan.caps),
        "template": plan.template,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": " ".join(["drafters", *sys.argv[1:]]),
        "versions": f"python {platform.python_version()}, {plan.engine}",
        "timing": "requests over HTTP, a fixed number at once, one server after the other",
        "machine": machine.describe() if is_ours else "the servers' own",
        "counting": f"{COUNTING_RULE} By the server's own counters.",
        **fingerprints(plan.settings),
    }


def _missing_turns(found: ServedRuns) -> list[str]:
    lines = []
    for benchmark, questions in found.plan.questions.items():
        answers = found.runs[benchmark, found.plan.baseline, found.plan.concurrency[0]].answers
        pairs = zip(questions, answers, strict=True)
        if count := sum(len(question.turns) - len(answer.turns) for question, answer in pairs):
            lines.append(f"{benchmark}: {count} later turns, which no longer fit into the context")
    return lines
