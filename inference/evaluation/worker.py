"""One process of an evaluation: answers its questions on its device and keeps the answers in its journal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from data.files import validated
from inference import drafter_specs, timing
from inference.evaluation.answering import Slot, answer_questions, decoding_order
from inference.evaluation.plan import NEW_SETTINGS, EvaluationPlan
from inference.journal import Journal
from inference.results import records
from inference.results.records import Answer
from inference.verifier.base import load_base
from inference.verifier.compiled import make_runner
from inference.verifier.sampling import Sampler, Typical


class Worker:
    """One process of an evaluation, with the base and the drafters loaded.

    Args:
        plan: What is decoded.
        number: Number of the process, from 0.

    Raises:
        ValueError: The base or a drafter cannot be loaded.
    """

    def __init__(self, plan: EvaluationPlan, number: int = 0) -> None:
        self.plan, self.number = plan, number
        torch.set_num_threads(plan.threads)
        device = torch.device(plan.devices[number])
        self.gpu_use = timing.gpu_use(device)
        self._has_started = False
        self.base = load_base(plan.base, plan.dtype, device, packed=plan.packed)
        runner = make_runner(self.base, plan.compile)
        options = plan.sampling
        exact = options.sampler()
        sampler: Sampler = exact
        if plan.typical:
            sampler = Typical(
                temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, seed=options.seed
            )
        self.sessions = {
            name: drafter_specs.make_session(spec, runner, exact if spec == "none" else sampler)
            for name, spec in plan.drafters.items()
        }

    def run(
        self,
        path: Path,
        load: float | None,
        repeat: int = 0,
        benchmarks: Sequence[str] = (),
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Iterator[bool]:
        """Answer the questions of one repeat that the journal does not hold; yield for each if it was decoded now.

        The journal has an entry ``{"load", "gpu_use"}`` for each start, and an entry
        ``{"benchmark", "repeat", "place", "load", "answer"}`` for each answer.

        Args:
            path: The journal's file.
            load: `timing.running_threads` before the start.
            repeat: Number of times that all questions were decoded before.
            benchmarks: Names of the benchmarks; all of them if there are none.
            is_wanted: Called before an answer is kept; the work stops when it returns False.
        """
        with Journal(path, self.plan.settings, may_lack=NEW_SETTINGS) as journal:
            done = read_answers(journal)
            for benchmark in benchmarks or self.plan.questions:
                before = done.get((benchmark, repeat), {})
                yield from [False] * len(before)
                for (index, _), answer in self._missing_answers(benchmark, repeat, before):
                    if not is_wanted():
                        return
                    if not self._has_started:
                        journal.append({"load": load, "gpu_use": self.gpu_use})
                        self._has_started = True
                    entry = {"benchmark": benchmark, "repeat": repeat, "place": index}
                    journal.append(entry | {"load": timing.load_average(), "answer": records.to_json(answer)})
                    yield True

    def _missing_answers(
        self, benchmark: str, repeat: int, before: dict[Slot, Answer]
    ) -> Iterator[tuple[Slot, Answer]]:
        """Decode the answers that are missing; yield each with its question's index among all questions."""
        plan, indices = self.plan, self.plan.indices_of_process(self.number, benchmark)
        if not indices:
            return
        questions = [plan.questions[benchmark][index] for index in indices]
        done = {(indices.index(index), name): answer for (index, name), answer in before.items()}
        slots = [slot for slot in decoding_order(list(self.sessions), len(indices), repeat) if slot not in done]
        answers = answer_questions(
            self.base, self.sessions, questions, plan.template, plan.caps[benchmark], done, repeat
        )
        for (index, name), answer in zip(slots, answers, strict=True):
            yield (indices[index], name), answer


def read_answers(journal: Journal) -> dict[tuple[str, int], dict[Slot, Answer]]:
    """The answers in a journal, by benchmark and repeat."""
    answers: dict[tuple[str, int], dict[Slot, Answer]] = {}
    for read in journal.entries(_read_answer):
        if read:
            key, place, answer = read
            answers.setdefault(key, {})[place, answer.drafter] = answer
    return answers


def _read_answer(entry: dict[str, Any]) -> tuple[tuple[str, int], int, Answer] | None:
    """The benchmark and repeat, the question's index and the answer of an entry; None for the entry of a start."""
    if "answer" not in entry:
        return None
    key, place = validated(tuple[tuple[str, int], int], ((entry["benchmark"], entry["repeat"]), entry["place"]))
    return key, place, records.from_json(entry["answer"])
