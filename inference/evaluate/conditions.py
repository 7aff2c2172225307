"""What was run: the conditions of an evaluation, which continues under equal ones only, and what happened in it."""

import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any, Literal

from data.files import hash_of
from data.hub import find_base
from inference import drafter_specs
from inference.evaluate.intervals import Count
from inference.options import GREEDY, ModelOptions, QuestionOptions, SamplingOptions
from inference.prompts import BenchmarkPrompts
from inference.runs import fingerprint
from inference.timing import MachineLoad

BASELINE = "none"  # the base alone
FILE_OPTIONS = "inner", "corpus", "static"  # options of drafters that name files
OWN_LOOP = "drafters"  # the engine that is this project's own decoding loop


@dataclass(frozen=True)
class DrafterConditions:
    """What a drafter of an evaluation is."""

    spec: str  # or the address of a server
    fingerprint: str = ""  # of its folders and files; empty if it has none


@dataclass(frozen=True)
class BenchmarkConditions:
    """What a benchmark of an evaluation asks."""

    questions: str  # fingerprint of the questions
    max_new_tokens: Count  # of an answer


@dataclass(frozen=True)
class RunConditions:
    """The conditions under which an evaluation measures: all that its answers and their times depend on.

    They are the first line of ``answers/run.jsonl``, and stand in results.json. Figures of two evaluations may be
    compared where `compare.differing_conditions` names nothing.
    """

    base: str
    base_fingerprint: str  # of its files; empty for a base of the hub
    dtype: str
    engine: str  # `OWN_LOOP`, or a server and its version
    device: str  # or the addresses of servers
    machine: str  # name of the GPU or processor
    threads: Count | None  # torch threads
    versions: dict[str, str]
    template: str
    sampling: SamplingOptions = GREEDY
    forward: str = "eager"  # how the base's forwards are run
    repeats: int | Literal["auto"] = 1  # auto decodes a benchmark until its speed-ups are precise
    drafters: dict[str, DrafterConditions] = field(default_factory=dict)  # by name in tables; the baseline first
    benchmarks: dict[str, BenchmarkConditions] = field(default_factory=dict)

    @property
    def caps(self) -> dict[str, int]:
        """The maximum number of tokens of an answer, by benchmark."""
        return {name: benchmark.max_new_tokens for name, benchmark in self.benchmarks.items()}

    def same(self) -> dict[str, str]:
        """What must be equal in figures that are compared, besides the base and the benchmarks, in words."""
        threads = f", {self.threads} thread{'' if self.threads == 1 else 's'}" if self.threads else ""
        decoding = "greedy"
        if self.sampling.temperature:
            decoding = ", ".join(f"{name} {value}" for name, value in asdict(self.sampling).items())
        return {
            "engine": self.engine,
            "dtype": self.dtype,
            "forward": self.forward,
            "device": f"{self.device} ({self.machine}{threads})",
            "decoding": decoding,
            "template": self.template,
        }


def make_conditions(
    model: ModelOptions,
    selection: QuestionOptions,
    prompts: Mapping[str, BenchmarkPrompts],
    packages: Sequence[str],
    **conditions: Any,
) -> RunConditions:
    """The conditions of an evaluation of these questions with packages; the source of the answers gives the others."""
    benchmarks = {
        name: BenchmarkConditions(
            hash_of([[question.as_dict() for question in prompts[name].questions]], 16), selection.caps()[name]
        )
        for name in prompts
    }
    return RunConditions(
        base=model.base,
        base_fingerprint=fingerprint(find_base(model.base)),
        versions={"python": platform.python_version(), **{package: version(package) for package in packages}},
        template=selection.template,
        benchmarks=benchmarks,
        **conditions,
    )


def drafter_conditions(specs: Sequence[str]) -> dict[str, DrafterConditions]:
    """The base alone and each drafter, by its name in the tables; raises ValueError if one is named twice."""
    labels = drafter_specs.labels([BASELINE, *(spec for spec in specs if spec != BASELINE)])
    conditions = {}
    for name, spec in labels.items():
        parts = drafter_specs.split(spec)
        conditions[name] = DrafterConditions(spec, drafter_fingerprint(parts.file, parts.pairs))
    return conditions


def drafter_fingerprint(file: str | None, options: Iterable[tuple[str, str]]) -> str:
    """The fingerprints of the file of a drafter and of those that its options name, joined by ``+``."""
    files = [str(drafter_specs.drafter_folder(file))] if file else []
    for option, value in options:
        files += value.split("+") if option in FILE_OPTIONS else []
    return "+".join(filter(None, map(fingerprint, files)))


@dataclass(frozen=True)
class RunRecord:
    """What happened in an evaluation."""

    load: MachineLoad | None = None  # None in a server elsewhere
    repeats: dict[str, Count] = field(default_factory=dict)  # how often every question was decoded, by benchmark
    starts: Count = 1  # of the command, until all answers were there
    ran_code: bool = False  # whether the programs in the answers were run, in bubblewrap
    left_out: list[str] = field(default_factory=list)  # one line each
    warnings: list[str] = field(default_factory=list)  # what speaks against the figures, one line each
    row_multiple: Count | None = None  # of bit-identical rows, which are fed in multiples of it
    date: str = field(default_factory=lambda: datetime.now(timezone.utc).strftime("%Y-%m-%d"))
    command: str = field(default_factory=lambda: " ".join(["drafters", *sys.argv[1:]]))


def describe(conditions: RunConditions, record: RunRecord) -> dict[str, str]:
    """What was run, in words, by what it is."""

    def printed(name: str, fingerprint: str) -> str:
        return f"{name} ({fingerprint})" if fingerprint else name

    specs = {name: printed(drafter.spec, drafter.fingerprint) for name, drafter in conditions.drafters.items()}
    load = {} if record.load is None else {name: value for name, value in asdict(record.load).items() if value}
    feeding = f" (rows in multiples of {record.row_multiple})" * ((record.row_multiple or 1) > 1)
    lines = {
        "base": printed(conditions.base, conditions.base_fingerprint),
        **conditions.same(),
        "bit-identical": "yes" + feeding if record.row_multiple else "",
        "drafters": "; ".join(f"{name}: {spec}" for name, spec in specs.items()),
        "length caps": ", ".join(f"{cap} tokens ({name})" for name, cap in conditions.caps.items()),
        "questions decoded": ", ".join(f"{count} times ({name})" for name, count in record.repeats.items()),
        "machine": ", ".join(f"{name} {value}" for name, value in load.items()),
        "versions": ", ".join(f"{name} {number}" for name, number in conditions.versions.items()),
        "programs in the answers": "were run in bubblewrap" * record.ran_code,
        "starts": str(record.starts) if record.starts > 1 else "",
        "date": record.date,
        "command": record.command,
    }
    return {name: line for name, line in lines.items() if line}
