"""Speed-ups of drafters that take turns every few steps, for differences of a few percent.

`drafters eval` decodes whole answers one after the other. The speed of a machine that is shared changes in between, by
several percent here, which hides whether a drafter costs 1 % or 4 %. Drafters that alternate every few steps meet the
same machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from math import exp, log
from statistics import median

import torch

from benchmarks.harness import ResultTable, main, show
from data.benchmarks import Question, load_questions
from inference import drafter_specs
from inference.drafter_specs import Budget
from inference.progress import progress_bars
from inference.prompts import encode_question
from inference.results import intervals
from inference.verifier.base import Base, Dtype, load_base
from inference.verifier.runner import Runner
from inference.verifier.session import Session, StepCost

WARM_UP_TOKENS = 16
HEADINGS = ["drafter", "speed-up", "error", "acceptance", "fed", "step without a draft"]


class Decoding:
    """One answer of one drafter, decoded a few steps at a time.

    Args:
        session: Decodes with the drafter.
        prompt: Token ids.
        max_new_tokens: Maximum number of tokens.
        eos: End-of-sequence tokens.
    """

    def __init__(self, session: Session, prompt: Sequence[int], max_new_tokens: int, eos: frozenset[int]) -> None:
        self.tokens: list[int] = []
        self.steps: list[StepCost] = []  # without the prefill
        self.seconds = 0.0
        self._steps: Iterator[tuple[list[int], StepCost]] | None = session.decode(prompt, max_new_tokens, eos)
        emitted, _ = next(self._steps)
        self.tokens += emitted

    @property
    def is_finished(self) -> bool:
        """Whether the answer has ended."""
        return self._steps is None

    def run(self, num_steps: int) -> None:
        """Decode some steps further, and add the time that they take, or the thread's CPU time if that is less."""
        wall, on_core = time.perf_counter(), time.thread_time()
        for _ in range(num_steps):
            if self._steps is None:
                break
            if (found := next(self._steps, None)) is None:
                self._steps = None
                break
            self.tokens += found[0]
            self.steps.append(found[1])
        self.seconds += min(time.perf_counter() - wall, time.thread_time() - on_core)


def taking_turns(
    base: str,
    drafter: list[str],
    benchmark: str = "embedded",
    questions: str | None = None,
    offset: int = 0,
    limit: int | None = None,
    max_new_tokens: int = 128,
    template: str = "tokenizer",
    budget: Budget = "auto",
    dtype: Dtype = "float32",
    turn: int = 16,
    repeats: int = 2,
    threads: int = 1,
    out: str | None = None,
) -> None:
    """Decode the first turns of questions with all drafters at once, which alternate every few steps, on a CPU.

    All of them must write the same texts. The prefill is not measured. Every drafter has a KV cache of its own.

    Args:
        base: Folder or hub id of the base.
        drafter: Drafters as in `drafters eval`, for example "[anpd,joint]"; none, without a drafter, is added.
        benchmark: Format of the questions, as in `drafters eval`.
        questions: JSONL file with the questions.
        offset: Number of questions to skip at the beginning.
        limit: Maximum number of questions.
        max_new_tokens: Maximum number of tokens of an answer.
        template: Chat template, as in `drafters eval`.
        budget: Budget of drafters whose specs do not decide it, as in `drafters eval`.
        dtype: Dtype of the base.
        turn: Steps of a drafter until it is another one's turn.
        repeats: Times that all questions are decoded; budgets keep what they have learned.
        threads: Number of torch threads.
        out: Markdown file to write the table to.
    """
    if min(turn, repeats, threads) < 1:
        raise ValueError("turn, repeats and threads must be at least 1")
    torch.set_num_threads(threads)
    loaded = load_base(base, dtype)
    specs = drafter_specs.labels(["none", *(spec for spec in drafter if spec != "none")])
    sessions = {name: drafter_specs.make_session(spec, Runner(loaded), None, budget) for name, spec in specs.items()}
    chosen = load_questions(benchmark, questions, offset, limit)
    decode(loaded, sessions, chosen[0], template, WARM_UP_TOKENS, turn, random.Random(0))
    # By drafter and question, the answers of all repeats.
    answers: dict[str, list[list[Decoding]]] = {name: [[] for _ in chosen] for name in sessions}
    with progress_bars(transient=True) as progress:
        task = progress.add_task("questions", total=len(chosen) * repeats)
        for repeat in range(repeats):
            for session in sessions.values():
                session.drafter.reset()  # otherwise it would know the answers
            for index, question in enumerate(chosen):
                order = random.Random(repeat * len(chosen) + index)
                decoded = decode(loaded, sessions, question, template, max_new_tokens, turn, order)
                for name, answer in decoded.items():
                    answers[name][index].append(answer)
                progress.advance(task)
    table = ResultTable("Speed-up of drafters that take turns", HEADINGS)
    table.rows = [row(name, answers[name], answers["none"]) for name in sessions]
    table.notes = [
        f"Base {base}, {dtype}; first turns of {len(chosen)} questions of {benchmark}, at most {max_new_tokens} "
        f"tokens; budget {budget}; drafters alternate every {turn} steps in random order; {repeats} repeats.",
        "Speed-up: geometric mean over questions and repeats of the time without a drafter by the time with it; the "
        "prefill is not measured. Error: half-width of its 95 % interval, from the spread between repeats, or over the "
        "questions if there is one repeat.",
        "Step without a draft: the median time of steps that feed one token, relative to those of none.",
    ]
    show([table], torch.device("cpu"), out)


def decode(
    base: Base,
    sessions: dict[str, Session],
    question: Question,
    template: str,
    max_new_tokens: int,
    turn: int,
    order: random.Random,
) -> dict[str, Decoding]:
    """Decode the first turn of a question with all drafters, which alternate in random order.

    Raises:
        ValueError: A drafter writes another text than the base alone.
    """
    prompt = encode_question(base, question, [("user", question.turns[0])], template)
    decoded = {name: Decoding(session, prompt, max_new_tokens, base.eos) for name, session in sessions.items()}
    while unfinished := [name for name, answer in decoded.items() if not answer.is_finished]:
        for name in order.sample(unfinished, len(unfinished)):
            decoded[name].run(turn)
    for name, answer in decoded.items():
        if answer.tokens != decoded["none"].tokens:
            raise ValueError(f"question {question.question_id}: {name} writes another text than the base alone")
    return decoded


def row(name: str, answers: Sequence[Sequence[Decoding]], baseline: Sequence[Sequence[Decoding]]) -> list[str]:
    """The cells of one drafter, from its answers by question and repeat, and the baseline's."""
    pairs = [list(zip(own, base, strict=True)) for own, base in zip(answers, baseline, strict=True)]
    groups = [[log(base.seconds / own.seconds) for own, base in each if own.steps] for each in pairs]
    logs = [value for group in groups for value in group]
    error = intervals.half_width(groups)
    steps = [step for each in answers for own in each for step in own.steps]
    emitted = sum(step.emitted for step in steps)
    idle, vanilla = (_idle_seconds(each) for each in (answers, baseline))
    return [
        name,
        f"{exp(sum(logs) / len(logs)):.3f}",
        "–" if error is None else f"{100 * error:.1f} %",
        f"{emitted / len(steps):.2f}",
        f"{sum(step.fed for step in steps) / len(steps):.1f}",
        f"{idle / vanilla:.3f}" if idle and vanilla else "–",
    ]


def _idle_seconds(answers: Sequence[Sequence[Decoding]]) -> float | None:
    """Median time of the steps that feed one token and run no draft module; None if there are none."""
    own = [sum(step.seconds) for each in answers for one in each for step in one.steps]
    steps = [step for each in answers for one in each for step in one.steps]
    idle = [seconds for seconds, step in zip(own, steps, strict=True) if step.fed == 1 and not step.draft_forwards]
    return median(idle) if idle else None


if __name__ == "__main__":
    main(taking_turns)
