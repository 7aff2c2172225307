"""Our own decoding loop as the source of answers: every question with every drafter in turn, as often as needed."""

import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise

import torch

from data.benchmarks import Question
from data.conversations import Message
from data.files import validated
from data.templates import decode_answer
from inference import drafter_specs, timing
from inference.evaluate.answers import Answer, AnswerFiles, Turn, answer_turns, comparable, median_answers
from inference.evaluate.conditions import OWN_LOOP, RunRecord, drafter_conditions, make_conditions
from inference.evaluate.figures import Summary, summarise
from inference.evaluate.results import EvaluationResults
from inference.evaluate.step_times import MedianStepTimes, timing_error
from inference.options import EvaluationOptions, ModelOptions, QuestionOptions, SamplingOptions
from inference.prompts import BenchmarkPrompts, encode_question
from inference.runs import progress_bars
from inference.timing import MachineLoad
from inference.verifier.base import resolve_device
from inference.verifier.graphed import make_runner
from inference.verifier.session import Session, Step

MAX_REPEATS = 5  # of a benchmark whose speed-ups are not precise
PRECISION = 0.05  # relative timing error of a speed-up for which no repeat is added
DEFAULT_DRAFTERS = ("prompt_lookup", "joint")
WARM_UP_TOKENS = 16

Slot = tuple[int, str]  # the id of a question, and the name of a drafter


@dataclass(frozen=True)
class Start:
    """A start of the command, as ``run.jsonl`` holds it."""

    running: float | None  # `running_threads` before it
    gpu_use: int | None
    row_multiple: int | None  # of bit-identical rows


class OwnLoop:
    """Our own loop as a source of answers: it decodes every question with the base alone and with each drafter."""

    def __init__(
        self,
        model: ModelOptions,
        selection: QuestionOptions,
        prompts: Mapping[str, BenchmarkPrompts],
        sampling: SamplingOptions,
        options: EvaluationOptions,
    ) -> None:
        device = "cuda" if resolve_device(model.device).type == "cuda" else "cpu"
        self.model = model = model.on(torch.device(device))
        self.questions = {name: prompts[name].questions for name in prompts}  # by benchmark
        self.conditions = make_conditions(
            model,
            selection,
            prompts,
            dtype=model.dtype,
            engine=OWN_LOOP,
            device=device,
            machine=timing.machine_name(device),
            threads=torch.get_num_threads(),
            packages=("torch", "transformers"),
            sampling=sampling,
            forward=model.forward,
            repeats=options.repeats,
            drafters=drafter_conditions(options.drafter or DEFAULT_DRAFTERS),
        )

    @property
    def drafters(self) -> list[str]:
        """Names of the drafters; the first one is the base alone."""
        return list(self.conditions.drafters)

    # ---- decoding

    def run(self, files: AnswerFiles) -> int:
        """Decode what the files do not hold; return the number of new answers.

        Raises ValueError if the base or a drafter cannot be loaded.
        """
        conditions, device = self.conditions, torch.device(self.conditions.device)
        running, gpu_use = timing.running_threads(), timing.gpu_use(device)
        torch.set_num_threads(conditions.threads or 1)
        runner = make_runner(self.model.load_on(device))
        sessions = {
            name: drafter_specs.make_session(drafter.spec, runner, conditions.sampling.sampler())
            for name, drafter in conditions.drafters.items()
        }
        before = [] if running is None else [running]
        for line in MachineLoad(timing.num_cores(), conditions.threads or 1, before).warnings():
            print(f"drafters eval: {line}; the measured times will be unreliable", file=sys.stderr)
        start, num_new = Start(running, gpu_use, runner.row_multiple), 0
        with progress_bars() as bars:
            task = bars.add_task(", ".join(self.questions), total=0)
            for repeat, benchmarks in self.repeats(files):
                count = len(sessions) * sum(len(self.questions[name]) for name in benchmarks)
                bars.update(task, total=(bars.tasks[task].total or 0) + count)
                for benchmark, answer in self._decode(sessions, files, repeat, benchmarks):
                    if answer:
                        if not num_new:
                            files.add_event(asdict(start))
                        files.add(benchmark, answer)
                        num_new += 1
                    bars.advance(task)
        return num_new

    def repeats(self, files: AnswerFiles) -> Iterator[tuple[int, list[str]]]:
        """Yield how often all questions were decoded before, and the benchmarks to decode once more.

        Whether there is another repeat is decided when it is asked for, by the answers that the files then hold.
        """
        benchmarks, repeats = list(self.questions), self.conditions.repeats
        for repeat in range(MAX_REPEATS if repeats == "auto" else repeats):
            if repeat and repeats == "auto":
                errors = {name: self._errors(files, name, repeat) for name in benchmarks}
                benchmarks = [name for name in benchmarks if not all(map(is_precise, errors[name]))]
            if benchmarks:
                yield repeat, benchmarks

    def _decode(
        self, sessions: dict[str, Session], files: AnswerFiles, repeat: int, benchmarks: list[str]
    ) -> Iterator[tuple[str, Answer | None]]:
        """The benchmark of each question and drafter with its answer, or None if the files hold that already."""
        for benchmark in benchmarks:
            answers = (answer for name in sessions for answer in files.answers(benchmark, name).values())
            done = {(answer.question_id, answer.drafter): answer for answer in answers if answer.repeat == repeat}
            yield from [(benchmark, None)] * len(done)
            options = self.conditions.template, self.conditions.caps[benchmark], done, repeat
            for answer in answer_questions(sessions, self.questions[benchmark], *options):
                yield benchmark, replace(answer, repeat=repeat, load=timing.load_average())

    # ---- what was decoded

    def results(self, files: AnswerFiles) -> EvaluationResults:
        """Each drafter in comparison with the base alone, its answers of median time, and what happened."""
        summaries, answers, repeats, lines = {}, {}, {}, list[str]()
        for benchmark in self.questions:
            rounds = self._rounds(files, benchmark)
            baseline = rounds[self.drafters[0]]
            summaries[benchmark] = {name: summarise(rounds[name], baseline) for name in self.drafters}
            answers[benchmark] = {name: median_answers(rounds[name]) for name in self.drafters}
            repeats[benchmark] = len(baseline)
            lines += self._warnings(benchmark, summaries[benchmark], rounds)
        starts = [validated(Start, event) for event in files.events]
        loads = [answer.load for answer in files.all_answers() if answer.load is not None]
        load = MachineLoad(
            cores=timing.num_cores(),
            threads=self.conditions.threads or 1,
            before=[start.running for start in starts if start.running is not None],
            during=max(loads, default=None),
            gpu_percents=[start.gpu_use for start in starts if start.gpu_use is not None],
        )
        multiple = min((start.row_multiple or 0 for start in starts), default=0) or None
        record = RunRecord(load, repeats, len(starts), warnings=[*load.warnings(), *lines], row_multiple=multiple)
        return EvaluationResults(self.conditions, record, summaries, answers)

    def _rounds(self, files: AnswerFiles, benchmark: str) -> dict[str, list[list[Answer]]]:
        ids = [question.question_id for question in self.questions[benchmark]]
        return files.rounds(benchmark, self.drafters, ids)

    def _errors(self, files: AnswerFiles, benchmark: str, num_repeats: int) -> list[float | None]:
        """The `timing_error` of each drafter's speed-up, from the first repeats of a benchmark."""
        rounds = self._rounds(files, benchmark)
        baseline, *times = (MedianStepTimes(rounds[name][:num_repeats]) for name in self.drafters)
        return [timing_error(drafter, baseline) for drafter in times]

    def _warnings(
        self, benchmark: str, summaries: Mapping[str, Summary], rounds: Mapping[str, list[list[Answer]]]
    ) -> list[str]:
        """Speed-ups of a benchmark that are not precise, and drafters whose repeats differ."""
        lines, imprecise = [], []
        for name, summary in summaries.items():
            error = summary.speed.timing_error
            if self.conditions.repeats == "auto" and not summary.is_baseline and not is_precise(error):
                imprecise.append(f"{name} {'unknown' if error is None else f'± {100 * error:.0f} %'}")
        if imprecise:
            lines.append(
                f"the speed-ups on {benchmark} are not yet within {100 * PRECISION:.0f} % after "
                f"{len(rounds[self.drafters[0]])} repeats: {', '.join(imprecise)}"
            )
        for name, repeats in rounds.items():
            pairs = [pair for again in repeats[1:] for pair in zip(repeats[0], again, strict=True)]
            ids = sorted({answer.question_id for answer, other in pairs if comparable(answer) != comparable(other)})
            if ids:
                lines.append(
                    f"{name} decodes {len(ids)} questions of {benchmark} differently in different repeats, "
                    f"question {ids[0]} first: decoding is not deterministic on this device"
                )
        return lines


def is_precise(error: float | None) -> bool:
    """Whether a timing error is small enough that no repeat is added."""
    return error is not None and error <= PRECISION


# ---- one question after the other


def answer_question(session: Session, name: str, question: Question, template: str, max_new_tokens: int) -> Answer:
    """Decode all turns of a question with the drafter of a session, see `answer_turns`."""
    base = session.runner.base
    on_gpu = base.model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(base.model.device)

    def write(messages: list[Message], prompt: list[int]) -> Turn:
        tokens, steps = list[int](), list[Step]()
        session.prepare(prompt, max_new_tokens)
        started, marks = time.perf_counter(), [time.thread_time()]
        for emitted, step in session.decode(prompt, max_new_tokens, base.eos):
            marks.append(time.thread_time())
            tokens += emitted
            steps.append(step)
        seconds, text = time.perf_counter() - started, decode_answer(tokens, base.tokenizer).strip()
        # A thread that waits for a GPU is not slowed down by other work.
        cpu_seconds = [] if on_gpu else [after - before for before, after in pairwise(marks)]
        is_ended = bool(tokens) and tokens[-1] in base.eos
        return Turn(text, tokens, len(prompt), steps, seconds, is_ended, cpu_seconds)

    encode = partial(encode_question, base, question, template=template)
    turns = answer_turns(question, encode, base.context_length, write)
    peak = torch.cuda.max_memory_allocated(base.model.device) if on_gpu else None
    return Answer(question.question_id, question.category, name, turns, peak)


def decoding_order(names: Sequence[str], ids: Iterable[int], repeat: int = 0) -> list[Slot]:
    """All drafters on the first question, then on the second, and so on; each time another drafter comes first."""
    firsts = [(number, (place + repeat) % len(names)) for place, number in enumerate(ids)]
    return [(number, name) for number, first in firsts for name in [*names[first:], *names[:first]]]


def answer_questions(
    sessions: dict[str, Session],
    questions: Sequence[Question],
    template: str,
    max_new_tokens: int,
    done: Mapping[Slot, Answer] | None = None,
    repeat: int = 0,
) -> Iterator[Answer]:
    """Answer every question with every drafter, in `decoding_order`, and yield the answers that are new.

    Each drafter is warmed up on the first question and then reset. A drafter that remembers earlier texts decodes the
    answers that are done once more, because what it drafts for the others depends on them. Sessions are given by the
    names of their drafters, ``done`` are the answers of an interrupted run, and all questions were decoded ``repeat``
    times before.
    """
    done, by_id = done or {}, {question.question_id: question for question in questions}
    slots = decoding_order(list(sessions), by_id, repeat)
    unfinished = dict.fromkeys(name for number, name in slots if (number, name) not in done)
    for name in unfinished:
        answer_question(sessions[name], name, questions[0], template, min(WARM_UP_TOKENS, max_new_tokens))
        sessions[name].drafter.reset()
    for number, name in slots:
        before, remembers = done.get((number, name)), sessions[name].drafter.remembers
        if before and not (name in unfinished and remembers):
            continue
        answer = answer_question(sessions[name], name, by_id[number], template, max_new_tokens)
        if not before:
            yield answer
        elif comparable(answer) != comparable(before):
            warnings.warn(
                f"{name} decodes question {number} differently than before the interruption: decoding is not "
                "deterministic on this device, so the results may differ from those of an uninterrupted run",
                stacklevel=2,
            )
