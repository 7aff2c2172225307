"""Two evaluations of the same questions compared in pairs, with intervals that mark regressions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

from inference.evaluate import intervals
from inference.evaluate.answers import Answer
from inference.evaluate.metrics import decode_steps
from inference.evaluate.plan import differing
from inference.evaluate.results import EvaluationResults, differing_budgets
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
class _Pairing:
    """A drafter's answers in both evaluations, and the baselines', each in the order of the shared questions."""

    benchmark: str
    drafter: str
    sides: list[list[Answer]]  # the drafter's answers before and after, then the baselines'
    timing_errors: list[float | None]  # before and after


def compare(before: EvaluationResults, after: EvaluationResults) -> list[Difference]:
    """Compare the drafters of two evaluations question by question.

    The intervals are simultaneous: whatever the number of figures, equal evaluations have something marked in at most
    5 % of cases (Bonferroni). They come from the bootstrap over questions of `intervals.interval`, applied to the ratio
    of both figures, so that what is hard about a question cancels. That of the speed-up is widened by the timing errors
    of both evaluations, at the same level, and the speed-up is not judged where one of them is unknown. Speed-ups are
    by median step times, as in a `Summary`, from the kept answers.

    Args:
        before: The evaluation to compare with.
        after: The evaluation that is judged.

    Raises:
        ValueError: They share no benchmark, drafter or question, or a question has another prompt.
    """
    pairings = _pairings(before, after)
    level = 1 - ERROR_RATE / (2 * len(pairings))
    found = [each for pairing in pairings for each in _differences(pairing, level)]
    if not found:
        raise ValueError(f"{before.name} and {after.name} have no decoding step to compare: give longer answers")
    return found


def unpaired(before: EvaluationResults, after: EvaluationResults) -> tuple[list[str], list[str]]:
    """What only the first evaluation has, and what only the second has: benchmarks, drafters, answers to questions."""
    sides, lines = (before, after), (list[str](), list[str]())
    for at in (0, 1):
        lines[at].extend(f"the benchmark {name}" for name in sides[at].summaries if name not in sides[1 - at].summaries)
    for benchmark in (name for name in before.summaries if name in after.summaries):
        pairs = _matched(before, after, benchmark)
        for at, results in enumerate(sides):
            paired = {pair[at] for pair in pairs.items()}
            drafters = (name for name, summary in results.summaries[benchmark].items() if not summary.is_baseline)
            lines[at].extend(f"{benchmark}: the drafter {name}" for name in drafters if name not in paired)
        for pair in pairs.items():
            numbers = [_answered(results, benchmark, name) for results, name in zip(sides, pair, strict=True)]
            for at in (0, 1):
                if gone := [str(number) for number in numbers[at] if number not in numbers[1 - at]]:
                    shown = ", ".join(gone[:MAX_NUMBERS]) + ", ..." * (len(gone) > MAX_NUMBERS)
                    count = f"{len(gone)} of {len(numbers[at])} answers"
                    lines[at].append(f"{benchmark}, {pair[at]}: {count}, to the questions {shown}")
    return lines


def differing_conditions(before: EvaluationResults, after: EvaluationResults) -> list[str]:
    """One line for each condition, such as the dtype, in which the evaluations differ."""
    ours, its = before.conditions, after.conditions
    shared = [benchmark for benchmark in before.summaries if benchmark in after.summaries]
    caps = [(name, before.cap(name), after.cap(name)) for name in shared]
    matched = {own: other for name in shared for own, other in _matched(before, after, name).items()}
    lengths = [f"length cap of {name}: {own} and {other}" for name, own, other in caps if own != other]
    return [*differing(ours, its), *lengths, *differing_budgets(ours, its, matched)]


def _pairings(before: EvaluationResults, after: EvaluationResults) -> list[_Pairing]:
    found = []
    for results in (before, after):
        if any(summary.latency for by_drafter in results.summaries.values() for summary in by_drafter.values()):
            raise ValueError(
                f"{results.name} was measured in a server, which reports no single steps: compare the tables of both, "
                "drafters report FOLDER OTHER --out PAGE"
            )
    for benchmark in (name for name in before.summaries if name in after.summaries):
        for own, its in _matched(before, after, benchmark).items():
            both = [(before, before.summaries[benchmark][own]), (after, after.summaries[benchmark][its])]
            names = [(results, summary.drafter) for results, summary in both]
            names += [(results, summary.baseline) for results, summary in both]
            answers = [{a.question_id: a for a in r.answers[benchmark].get(name, [])} for r, name in names]
            shared = [number for number in answers[0] if all(number in each for each in answers)]
            for number in shared:
                _check_prompts(benchmark, answers[0][number], answers[1][number])
            if shared:
                sides = [[each[number] for number in shared] for each in answers]
                errors = [summary.speed.timing_error for _, summary in both]
                found.append(_Pairing(benchmark, own if own == its else f"{own} → {its}", sides, errors))
    if not found:
        raise ValueError(
            f"{before.name} and {after.name} share no answered question of a drafter: compare evaluations of the same "
            "benchmarks and drafters, whose folders still hold answers/"
        )
    return found


def _matched(before: EvaluationResults, after: EvaluationResults, benchmark: str) -> dict[str, str]:
    """The names of the same drafter in both; a single drafter on each side is compared whatever it is called."""
    ours, its = (
        [name for name, summary in results.summaries[benchmark].items() if not summary.is_baseline]
        for results in (before, after)
    )
    shared = {name: name for name in ours if name in its}
    return shared or ({ours[0]: its[0]} if len(ours) == len(its) == 1 else {})


def _answered(results: EvaluationResults, benchmark: str, drafter: str) -> dict[int, Answer]:
    """The answers of a drafter to what the baseline also answered, by question; none if they have no decoding step."""
    answers, baseline = results.answers[benchmark], results.summaries[benchmark][drafter].baseline
    known = {answer.question_id for answer in answers.get(baseline, [])}
    own = {answer.question_id: answer for answer in answers.get(drafter, []) if answer.question_id in known}
    return own if any(decode_steps(answer.turns) for answer in own.values()) else {}


def _check_prompts(benchmark: str, before: Answer, after: Answer) -> None:
    lengths = [answer.turns[0].prompt_tokens for answer in (before, after) if answer.turns]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"{benchmark}, question {before.question_id}: its prompt has {lengths[0]} tokens in one evaluation and "
            f"{lengths[1]} in the other: compare evaluations with the same questions, template and tokenizer"
        )


def _differences(pairing: _Pairing, level: float) -> Iterator[Difference]:
    """The figures that both evaluations have: each is a product of powers of sums, over the questions, of columns."""
    before, after, base_before, base_after = pairing.sides
    lengths = [column for answers in (after, before) for column in _emitted_and_steps(answers)]
    speeds = [column for own in (base_after, after, base_before, before) for column in _seconds_and_tokens(own)]
    at_level, published = (NormalDist().inv_cdf((1 + each) / 2) for each in (level, intervals.PUBLISHED_LEVEL))
    errors = [error for error in pairing.timing_errors if error is not None]
    error = math.hypot(*errors) * at_level / published if len(errors) == 2 else None
    figures: dict[str, tuple[list[Any], tuple[int, ...], float | None]] = {
        "acceptance length": (lengths, (1, -1), 0.0),
        "speed-up": (speeds, (1, -1, -1, 1), error),
    }
    for figure, (columns, powers, own_error) in figures.items():
        sums, count = [sum(column) for column in columns], len(before)
        if min(sums) <= 0:
            continue
        new, old = (
            math.prod(total**power for total, power in zip(half, powers, strict=True))
            for half in (sums[: len(powers)], sums[len(powers) :])
        )
        bounds = None
        if own_error is not None and count >= MIN_QUESTIONS:
            bounds = intervals.interval(columns, (*powers, *(-power for power in powers)), level)
        bounds = bounds and _widened(new / old, bounds, own_error or 0.0)
        yield Difference(pairing.benchmark, pairing.drafter, figure, count, old, new, bounds)


def _widened(ratio: float, bounds: tuple[float, float], error: float) -> tuple[float, float]:
    """The interval of ``ratio - 1``, whose logarithm has an independent error of this half-width besides."""
    below = math.hypot(math.log(ratio / bounds[0]), error) if bounds[0] else math.inf
    above = math.hypot(math.log(bounds[1] / ratio), error)
    return ratio * math.exp(-below) - 1, ratio * math.exp(above) - 1


def _emitted_and_steps(answers: Sequence[Answer]) -> tuple[list[int], list[int]]:
    steps = [decode_steps(answer.turns) for answer in answers]
    return [sum(step.emitted for step in own) for own in steps], [len(own) for own in steps]


def _seconds_and_tokens(answers: Sequence[Answer]) -> tuple[list[float], list[int]]:
    times = MedianStepTimes([answers])
    tokens = [sum(len(turn.token_ids) for turn in answer.turns) for answer in answers]
    return [times.seconds(answer) for answer in answers], tokens
