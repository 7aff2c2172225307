"""What an evaluation measures, and its conditions: data for every process, for the journal and for the results."""

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from data.benchmarks import Question
from data.files import hash_of
from data.hub import find_base
from drafters.checks import check_at_least
from inference import drafter_specs
from inference.evaluate.intervals import Count
from inference.prompts import BenchmarkPrompts, QuestionOptions
from inference.runs import fingerprint
from inference.timing import machine_name
from inference.verifier.base import resolve_device
from inference.verifier.options import GREEDY, ModelOptions, SamplingOptions

BASELINE = "none"  # the base alone
FILE_OPTIONS = "inner", "corpus", "static"  # options of drafters that name files
LOSSY = " (lossy)"  # behind the name of a drafter whose drafts were accepted by typical acceptance, in older results
OWN_LOOP = "drafters"  # the engine that is this project's own decoding loop
DEFAULT_DRAFTERS = ("prompt_lookup", "joint")


@dataclass(frozen=True)
class EvaluationOptions:
    """How `drafters eval` measures.

    Args:
        drafter: NAME[=FILE][:key=value,...], such as joint, anpd:order=4 or ctc=FOLDER; may be repeated. By default
            prompt_lookup and joint; the base alone, none, is always measured too.
        repeats: How often every question is decoded; auto repeats until timing errors are at most 5 %.
        reset: Reset each drafter before each benchmark. If false, it goes on with what it remembers of those before.
        run_code: Run the programs in the answers to humaneval and mbpp in bubblewrap, to measure pass@1.
        server: Measure vllm, or a server that runs: [NAME=]URL, may be repeated; the first is the baseline.
        concurrency: Number of requests at once that a server gets; may be repeated. By default 1, 4 and 16.
    """

    drafter: list[str] | None = None
    repeats: int | Literal["auto"] = "auto"
    reset: bool = True
    run_code: bool = False
    server: list[str] | None = None
    concurrency: list[int] | None = None

    def check(self, sampling: SamplingOptions) -> None:
        """Find mistakes that need neither a base nor a benchmark; raises ValueError."""
        sampling.sampler()
        for spec in self.drafter or [] if not self.server else []:
            _ = drafter_specs.split(spec).registration  # there is such a drafter
        numbers: Any = {"repeats": self.repeats, "concurrency": min(self.concurrency or [1])}
        check_at_least(1, **{name: number for name, number in numbers.items() if number != "auto"})
        if not self.server and self.concurrency:
            raise ValueError("--concurrency is for a server: add --server vllm or --server URL")
        if self.server and (sampling.temperature or not self.reset):
            raise ValueError("--temperature and --reset are for our own decoding loop, not for --server")


@dataclass(frozen=True)
class DrafterConditions:
    """What a drafter of an evaluation is."""

    spec: str  # or the address of a server
    fingerprint: str = ""  # of its folders and files; empty if it has none
    is_lossy: bool = False  # whether its drafts were accepted by typical acceptance, in older results


@dataclass(frozen=True)
class BenchmarkConditions:
    """What a benchmark of an evaluation asks."""

    questions: str  # fingerprint of the questions
    max_new_tokens: Count  # of an answer


@dataclass(frozen=True)
class RunConditions:
    """The conditions under which an evaluation measures: all that its answers and their times depend on.

    They are the first line of its journal, which continues under equal ones only, and stand in results.json. Figures of
    two evaluations may be compared where `differing` names nothing.
    """

    base: str
    base_fingerprint: str  # of its files; empty for a base of the hub
    dtype: str
    engine: str  # `OWN_LOOP`, or a server and its version
    devices: list[str]  # the device, or the addresses of servers
    machine: str  # name of the GPU or processor
    threads: Count | None  # torch threads
    versions: dict[str, str]
    template: str
    sampling: SamplingOptions = GREEDY
    forward: str = "eager"  # how the base's forwards are run
    repeats: int | Literal["auto"] = 1  # auto decodes a benchmark until its speed-ups are precise
    drafters: dict[str, DrafterConditions] = field(default_factory=dict)  # by name in tables; the baseline first
    benchmarks: dict[str, BenchmarkConditions] = field(default_factory=dict)
    memory: list[str] = field(default_factory=list)  # benchmarks in the order drafters remember; empty if all reset

    @property
    def caps(self) -> dict[str, int]:
        """The maximum number of tokens of an answer, by benchmark."""
        return {name: benchmark.max_new_tokens for name, benchmark in self.benchmarks.items()}

    def same(self) -> dict[str, str]:
        """What must be equal in figures that are compared, besides the base and the benchmarks, in words."""
        devices = [each.partition(":")[0] if self.engine == OWN_LOOP else each for each in self.devices]
        threads = f", {self.threads} thread{'' if self.threads == 1 else 's'}" if self.threads else ""
        own, is_lossy = self.sampling, any(drafter.is_lossy for drafter in self.drafters.values())
        memory = f", drafters' memory kept over {', '.join(self.memory)}" if self.memory else ""
        sampled = f"temperature {own.temperature}, top_k {own.top_k}, top_p {own.top_p}, seed {own.seed}"
        return {
            "engine": self.engine,
            "dtype": self.dtype,
            "forward": self.forward,
            "device": f"{', '.join(devices)} ({self.machine}{threads})",
            "decoding": (sampled if own.temperature else "greedy") + memory + ", typical acceptance: lossy" * is_lossy,
            "template": self.template,
        }


def differing(ours: RunConditions, its: RunConditions) -> list[str]:
    """One line for each condition, such as the dtype, in which two evaluations differ.

    Bases are the same if their files have the same fingerprint, and are compared by name where one has none.
    """
    lines = []
    if ours.base_fingerprint and its.base_fingerprint:
        if ours.base_fingerprint != its.base_fingerprint:
            lines.append(f"base: {ours.base} and {its.base}" + ", whose files differ" * (ours.base == its.base))
    elif ours.base != its.base:
        lines.append(f"base: {ours.base} and {its.base}")
    pairs = zip(ours.same().items(), its.same().values(), strict=True)
    lines += [f"{name}: {own} and {other}" for (name, own), other in pairs if own != other]
    return lines


@dataclass(frozen=True)
class EvaluationPlan:
    """What our own loop decodes, and under which conditions."""

    model: ModelOptions
    conditions: RunConditions
    questions: dict[str, list[Question]]  # by benchmark

    @property
    def drafters(self) -> list[str]:
        """Names of the drafters; the first one is the base alone."""
        return list(self.conditions.drafters)

    def num_answers(self, benchmarks: Iterable[str]) -> int:
        """Number of answers that all drafters give to benchmarks in one repeat."""
        return len(self.drafters) * sum(len(self.questions[benchmark]) for benchmark in benchmarks)


def make_plan(
    model: ModelOptions,
    selection: QuestionOptions,
    prompts: Mapping[str, BenchmarkPrompts],
    sampling: SamplingOptions,
    options: EvaluationOptions,
) -> EvaluationPlan:
    """Decide what our own loop decodes."""
    device = "cuda:0" if resolve_device(model.device).type == "cuda" else "cpu"
    conditions = RunConditions(
        base=model.base,
        base_fingerprint=fingerprint(find_base(model.base)),
        dtype=model.dtype,
        engine=OWN_LOOP,
        devices=[device],
        machine=machine_name(device),
        threads=torch.get_num_threads(),
        versions=versions("torch", "transformers"),
        template=selection.template,
        sampling=sampling,
        forward=model.forward,
        repeats=options.repeats,
        drafters=drafter_conditions(options.drafter or DEFAULT_DRAFTERS),
        benchmarks=benchmark_conditions(selection, prompts),
        memory=[] if options.reset else list(prompts),
    )
    return EvaluationPlan(model, conditions, {name: own.questions for name, own in prompts.items()})


def drafter_conditions(specs: Sequence[str]) -> dict[str, DrafterConditions]:
    """The base alone and each drafter, by its name in the tables; raises ValueError if one is named twice."""
    labels = drafter_specs.labels([BASELINE, *(spec for spec in specs if spec != BASELINE)])
    found = {}
    for name, spec in labels.items():
        parts = drafter_specs.split(spec)
        files = [drafter_specs.drafter_folder(parts.file)] if parts.file else list[str | Path]()
        files += [file for key, value in parts.pairs if key in FILE_OPTIONS for file in value.split("+")]
        prints = "+".join(filter(None, map(fingerprint, files)))
        found[name] = DrafterConditions(spec, prints)
    return found


def benchmark_conditions(
    selection: QuestionOptions, prompts: Mapping[str, BenchmarkPrompts]
) -> dict[str, BenchmarkConditions]:
    """What each benchmark asks."""
    prints = {name: hash_of([[q.as_dict() for q in own.questions]], 16) for name, own in prompts.items()}
    return {name: BenchmarkConditions(prints[name], selection.caps()[name]) for name in prompts}


def versions(*packages: str) -> dict[str, str]:
    """The versions of Python and of packages."""
    return {"python": platform.python_version(), **{package: version(package) for package in packages}}
