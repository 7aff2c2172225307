"""Two evaluations of the same questions compared in pairs, with intervals that mark regressions."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

from inference.evaluate import intervals
from inference.evaluate.answers import Answer
from inference.evaluate.metrics import decode_steps
from inference.evaluate.plan import differing
from inference.evaluate.results import EvaluationResults
from inference.evaluate.step_times import MedianStepTimes

ERROR_RATE = 0.05  # probability that a comparison of equal evaluations marks anything
MIN_QUESTIONS = 10  # with fewer, the intervals of the bootstrap are too narrow
TOLERANCE = 1e-9  # relative difference of figures that are equal except for rounding
MAX_NUMBERS = 5  # of questions that are listed
Verdict = Literal["regression", "improvement", "none found", "not judged"]


@dataclass(frozen=True)
class Difference:
    """One figure of a drafter in two evaluations of the same questions."""

    benchmark: str
    drafter: str  # two names with an arrow between them if it differs
    figure: str  # acceptance length or speed-up
    num_questions: int  # that both evaluations answered
    before: float  # the figure in the first evaluation, over these questions
    after: float
    interval: tuple[float, float] | None  # of `change`; None if it is not known, as for fewer than ten questions

    @property
    def change(self) -> float:
        """Relative change: -0.03 is 3 % less."""
        return self.after / self.before - 1

    @property
    def verdict(self) -> Verdict:
        """A regression or an improvement if the interval does not contain 0."""
        if self.interval is None:
            return "not judged"
        low, high = self.interval
        return "regression" if high < -TOLERANCE else "improvement" if low > TOLERANCE else "none found"


@dataclass(frozen=True)
class _Side:
    """A drafter in one of two evaluations."""

    drafter: str
    answers: dict[int, Answer]  # by question, where the baseline answered it too
    baseline: dict[int, Answer]
    timing_error: float | None

    @property
    def measured(self) -> dict[int, Answer]:
        """The answers, or none if they have no decoding step."""
        return self.answers if any(decode_steps(answer.turns) for answer in self.answers.values()) else {}


@dataclass(frozen=True)
class _Pairing:
    """A drafter before and after."""

    benchmark: str
    sides: tuple[_Side, _Side]

    @property
    def shared(self) -> list[int]:
        """The questions that both evaluations answered."""
        return [number for number in self.sides[0].answers if number in self.sides[1].answers]


def compare(before: EvaluationResults, after: EvaluationResults) -> list[Difference]:
    """Compare the drafters of two evaluations question by question; the second one is judged.

    The intervals are simultaneous: whatever the number of figures, equal evaluations have something marked in at most
    5 % of cases (Bonferroni). They come from the bootstrap over questions of `intervals.interval`, applied to the ratio
    of both figures, so that what is hard about a question cancels. That of the speed-up is widened by the timing errors
    of both evaluations, at the same level, and the speed-up is not judged where one of them is unknown. Speed-ups are
    by median step times, as in a `Summary`, from the kept answers. Raises ValueError if they share no benchmark,
    drafter or question, or a question has another prompt.
    """
    for results in (before, after):
        if any(summary.latency for by_drafter in results.summaries.values() for summary in by_drafter.values()):
            raise ValueError(
                f"{results.name} was measured in a server, which reports no single steps: compare the tables of both, "
                "drafters report FOLDER OTHER --out PAGE"
            )
    pairings = [pairing for pairing in _pairings(before, after) if pairing.shared]
    if not pairings:
        raise ValueError(
            f"{before.name} and {after.name} share no answered question of a drafter: compare evaluations of the same "
            "benchmarks and drafters, whose folders still hold answers/"
        )
    level = 1 - ERROR_RATE / (2 * len(pairings))
    found = [each for pairing in pairings for each in _differences(pairing, level)]
    if not found:
        raise ValueError(f"{before.name} and {after.name} have no decoding step to compare: give longer answers")
    return found


def unpaired(before: EvaluationResults, after: EvaluationResults) -> tuple[list[str], list[str]]:
    """What only the first evaluation has, and what only the second has: benchmarks, drafters, answers to questions."""
    lines, pairings = (list[str](), list[str]()), _pairings(before, after)
    for at, (results, other) in enumerate(((before, after), (after, before))):
        lines[at].extend(f"the benchmark {name}" for name in results.summaries if name not in other.summaries)
        for benchmark in (name for name in before.summaries if name in after.summaries):
            paired = [pairing.sides for pairing in pairings if pairing.benchmark == benchmark]
            names = {sides[at].drafter for sides in paired}
            gone = (name for name in _drafters(results, benchmark) if name not in names)
            lines[at].extend(f"{benchmark}: the drafter {name}" for name in gone)
            for sides in paired:
                answers, others = sides[at].measured, sides[1 - at].measured
                if lost := [str(number) for number in answers if number not in others]:
                    shown = ", ".join(lost[:MAX_NUMBERS]) + ", ..." * (len(lost) > MAX_NUMBERS)
                    count = f"{len(lost)} of {len(answers)} answers"
                    lines[at].append(f"{benchmark}, {sides[at].drafter}: {count}, to the questions {shown}")
    return lines


def differing_conditions(before: EvaluationResults, after: EvaluationResults) -> list[str]:
    """One line for each condition, such as the dtype, in which the evaluations differ."""
    ours, its = before.conditions, after.conditions
    caps = [(name, before.cap(name), after.cap(name)) for name in before.summaries if name in after.summaries]
    lengths = [f"length cap of {name}: {own} and {other}" for name, own, other in caps if own != other]
    return differing(ours, its) + lengths


def _pairings(before: EvaluationResults, after: EvaluationResults) -> list[_Pairing]:
    """The drafters of the same name; a single drafter on each side is compared whatever it is called."""
    found = []
    for benchmark in (name for name in before.summaries if name in after.summaries):
        ours, its = (_drafters(results, benchmark) for results in (before, after))
        alone = list(zip(ours, its, strict=True)) if len(ours) == len(its) == 1 else []
        for own, other in [(name, name) for name in ours if name in its] or alone:
            found.append(_Pairing(benchmark, (_side(before, benchmark, own), _side(after, benchmark, other))))
    return found


def _drafters(results: EvaluationResults, benchmark: str) -> list[str]:
    return [name for name, summary in results.summaries[benchmark].items() if not summary.is_baseline]


def _side(results: EvaluationResults, benchmark: str, drafter: str) -> _Side:
    summary, recorded = results.summaries[benchmark][drafter], results.answers[benchmark]
    baseline = {answer.question_id: answer for answer in recorded.get(summary.baseline, [])}
    answers = {a.question_id: a for a in recorded.get(drafter, []) if a.question_id in baseline}
    return _Side(drafter, answers, baseline, summary.speed.timing_error)


def _differences(pairing: _Pairing, level: float) -> Iterator[Difference]:
    """The figures that both evaluations have: each is a product of powers of sums, over the questions, of columns."""
    numbers, (first, second), lengths, speeds = pairing.shared, pairing.sides, list[Any](), list[Any]()
    _check_prompts(pairing)
    for side in (second, first):
        own, base = ([answers[number] for number in numbers] for answers in (side.answers, side.baseline))
        steps = [decode_steps(answer.turns) for answer in own]
        lengths += [[sum(step.emitted for step in each) for each in steps], [len(each) for each in steps]]
        speeds += [*_seconds_and_tokens(base), *_seconds_and_tokens(own)]
    at_level, published = (NormalDist().inv_cdf((1 + each) / 2) for each in (level, intervals.PUBLISHED_LEVEL))
    errors = [side.timing_error for side in pairing.sides if side.timing_error is not None]
    error = math.hypot(*errors) * at_level / published if len(errors) == 2 else None
    figures: list[tuple[str, list[Any], tuple[int, ...], float | None]] = [
        ("acceptance length", lengths, (1, -1), 0.0),
        ("speed-up", speeds, (1, -1, -1, 1), error),
    ]
    for figure, columns, powers, own_error in figures:
        sums, bounds = [sum(column) for column in columns], None
        if min(sums) <= 0:
            continue
        halves = sums[: len(powers)], sums[len(powers) :]
        new, old = (math.prod(map(pow, half, powers)) for half in halves)
        if own_error is not None and len(numbers) >= MIN_QUESTIONS:
            bounds = intervals.interval(columns, (*powers, *(-power for power in powers)), level)
            bounds = bounds and _widened(new / old, bounds, own_error)
        name = " → ".join(dict.fromkeys(side.drafter for side in pairing.sides))
        yield Difference(pairing.benchmark, name, figure, len(numbers), old, new, bounds)


def _check_prompts(pairing: _Pairing) -> None:
    for number in pairing.shared:
        turns = [side.answers[number].turns for side in pairing.sides]
        lengths = [own[0].prompt_tokens for own in turns if own]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"{pairing.benchmark}, question {number}: its prompt has {lengths[0]} tokens in one evaluation and "
                f"{lengths[1]} in the other: compare evaluations with the same questions, template and tokenizer"
            )


def _widened(ratio: float, bounds: tuple[float, float], error: float) -> tuple[float, float]:
    """The interval of ``ratio - 1``, whose logarithm has an independent error of this half-width besides."""
    below = math.hypot(math.log(ratio / bounds[0]), error) if bounds[0] else math.inf
    above = math.hypot(math.log(bounds[1] / ratio), error)
    return ratio * math.exp(-below) - 1, ratio * math.exp(above) - 1


def _seconds_and_tokens(answers: Sequence[Answer]) -> tuple[list[float], list[int]]:
    times = MedianStepTimes([answers])
    tokens = [sum(len(turn.token_ids) for turn in answer.turns) for answer in answers]
    return [times.seconds(answer) for answer in answers], tokens
