"""What one process does of an evaluation: its questions, answered on its device and kept in its journal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from data.benchmarks import Question
from inference.engine.base import Dtype, load_base
from inference.engine.runner import Runner
from inference.engine.sampling import Typical, make_sampler
from inference.engine.session import Session
from inference.evaluation.answering import Place, answers, order
from inference.registry import catalogue
from inference.results import records
from inference.results.records import Answer
from inference.runs import timing
from inference.runs.fingerprint import fingerprint
from inference.runs.journal import Journal


@dataclass(frozen=True)
class Plan:
    """What an evaluation decodes, and how.

    Args:
        base: Folder or hub id.
        drafters: Spec of each drafter, by the name it goes by; the first, ``none``, is the base alone.
        questions: By benchmark.
        caps: Tokens of a turn at most, by benchmark.
        temperature, top_k, top_p, seed: Of the sampling.
        typical: Whether drafts are accepted by typical acceptance.
        template: Chat template.
        dtype: Number format.
        devices: One for each process.
        threads: Of each process.
        repeats: How often every question is decoded.
    """

    base: str
    drafters: dict[str, str]
    questions: dict[str, list[Question]]
    caps: dict[str, int]
    temperature: float
    top_k: int
    top_p: float
    seed: int
    typical: bool
    template: str
    dtype: Dtype
    devices: tuple[str, ...]
    threads: int
    repeats: int

    def work(self) -> dict[str, Any]:
        """What decides what the answers and their times will be, for a journal's first line."""
        files = {catalogue.split(spec)[1] for spec in self.drafters.values()} - {None}
        device = torch.device(self.devices[0])
        machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        plan = asdict(self) | {
            "questions": {
                name: _short(json.dumps([asdict(q) for q in asked])) for name, asked in self.questions.items()
            },
            "devices": list(self.devices),
            "files": {name: fingerprint(name) for name in sorted({self.base, *files})},
            "machine": f"{machine}, torch {torch.__version__}",
        }
        return json.loads(json.dumps(plan))  # as a journal gives it back

    def own(self, number: int, benchmark: str) -> list[int]:
        """Which questions of a benchmark a process answers: as many as there are processes lie between two."""
        return list(range(number, len(self.questions[benchmark]), len(self.devices)))


class Share:
    """One process's part, ready to decode.

    Args:
        plan: Of the whole.
        number: Of the process.

    Raises:
        ValueError: The base or a drafter cannot be had.
    """

    def __init__(self, plan: Plan, number: int = 0) -> None:
        self.plan, self.number = plan, number
        torch.set_num_threads(plan.threads)
        device = torch.device(plan.devices[number])
        self.gpu_use = timing.gpu_use(device)
        self.base = load_base(plan.base, plan.dtype, device)
        runner = Runner(self.base)
        warping = {"temperature": plan.temperature, "top_k": plan.top_k, "top_p": plan.top_p, "seed": plan.seed}
        exact = make_sampler(**warping)
        accept = Typical(**warping) if plan.typical else exact
        self.sessions = {
            name: Session(runner, catalogue.make(spec, runner), exact if spec == "none" else accept)
            for name, spec in plan.drafters.items()
        }

    def run(
        self,
        path: Path,
        work: dict[str, Any],
        load: float | None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Iterator[bool]:
        """Answer what the journal does not hold yet; for every answer whether it was given now.

        Lines are {"load", "gpu_use"} at each start, and {"benchmark", "repeat", "place", "load", "answer"}.

        Args:
            path: Of the journal.
            work: `Plan.work`.
            load: `timing.running` before the start.
            is_wanted: BenchmarkPrompts before an answer is kept; where it says no, the work stops.
        """
        with Journal(path, work) as journal:
            done = held(journal)
            begun = False
            for repeat in range(self.plan.repeats):
                for benchmark in self.plan.questions:
                    before = done.get((benchmark, repeat), {})
                    yield from [False] * len(before)
                    for (place, _), found in self._answers(benchmark, repeat, before):
                        if not is_wanted():
                            return
                        if not begun:
                            journal.append({"load": load, "gpu_use": self.gpu_use})
                            begun = True
                        line = {"benchmark": benchmark, "repeat": repeat, "place": place, "load": timing.load()}
                        journal.append(line | {"answer": records.to_json(found)})
                        yield True

    def _answers(self, benchmark: str, repeat: int, before: dict[Place, Answer]) -> Iterator[tuple[Place, Answer]]:
        """The answers that are missing, each with its question's place among all."""
        plan, own = self.plan, self.plan.own(self.number, benchmark)
        if not own:
            return
        asked = [plan.questions[benchmark][place] for place in own]
        done = {(own.index(place), name): answer for (place, name), answer in before.items()}
        left = [place for place in order(list(self.sessions), len(own), repeat) if place not in done]
        given = answers(self.base, self.sessions, asked, plan.template, plan.caps[benchmark], done, repeat)
        for (place, name), found in zip(left, given, strict=True):
            yield (own[place], name), found


def held(journal: Journal) -> dict[tuple[str, int], dict[Place, Answer]]:
    """The answers that a journal holds, by benchmark and repeat."""
    found: dict[tuple[str, int], dict[Place, Answer]] = {}
    for line in journal:
        if "answer" in line:
            answer = records.from_json(line["answer"])
            found.setdefault((line["benchmark"], line["repeat"]), {})[line["place"], answer.drafter] = answer
    return found


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
