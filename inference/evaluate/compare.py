"""Two evaluations of the same questions compared in pairs, with intervals that mark regressions."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

from inference.evaluate import intervals
from inference.evaluate.answers import Answer, count_tokens, decode_steps
from inference.evaluate.results import EvaluationResults
from inference.evaluate.step_times import MedianStepTimes
from inference.evaluate.tables import Row, Table, number, without_baseline

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
    """A drafter in two evaluations: by question its answer and the baseline's, before and after."""

    benchmark: str
    names: tuple[str, str]
    before: Mapping[int, tuple[Answer, Answer]]
    after: Mapping[int, tuple[Answer, Answer]]
    timing_errors: tuple[float | None, float | None]

    @property
    def shared(self) -> list[int]:
        """The questions that both evaluations answered."""
        return [question for question in self.before if question in self.after]


def compare(before: EvaluationResults, after: EvaluationResults) -> list[Difference]:
    """Compare the drafters of two evaluations question by question; the second one is judged.

    The intervals are simultaneous: whatever the number of figures, equal evaluations have something marked in at most
    5 % of cases (Bonferroni). They come from the bootstrap over questions of `intervals.interval`, applied to the ratio
    of both figures, so that what is hard about a question cancels. That of the speed-up is widened by the timing errors
    of both evaluations, at the same level, and the speed-up is not judged where one of them is unknown. Speed-ups are
    by median step times, as in a `Summary`, from the kept answers. Raises ValueError if they share no benchmark,
    drafter or question, or a question has another prompt.
    """
    pairings = [pairing for pairing in _pairings(before, after) if pairing.shared]
    if not pairings:
        raise ValueError(
            f"{before.name} and {after.name} share no answered question of a drafter: compare evaluations of the same "
            "benchmarks and drafters, whose folders still hold answers/"
        )
    level = 1 - ERROR_RATE / (2 * len(pairings))
    differences = [difference for pairing in pairings for difference in _differences(pairing, level)]
    if not differences:
        raise ValueError(
            f"{before.name} and {after.name} have no decoding step to compare: give longer answers; for servers, which "
            "report no steps, compare the tables of both by drafters report FOLDER OTHER --out PAGE"
        )
    return differences


def unpaired(results: EvaluationResults, other: EvaluationResults) -> list[str]:
    """What only the first of two evaluations has: benchmarks, drafters, answers to questions; one line each."""
    lines = [f"the benchmark {name}" for name in results.summaries if name not in other.summaries]
    pairings = _pairings(results, other)
    paired = [(pairing.benchmark, pairing.names[0]) for pairing in pairings]
    for benchmark in (name for name in results.summaries if name in other.summaries):
        names = (name for name in without_baseline(results.summaries[benchmark]) if (benchmark, name) not in paired)
        lines += [f"{benchmark}: the drafter {name}" for name in names]
    for pairing in pairings:
        answered, others = (
            pairs if any(decode_steps(answer.turns) for answer, _ in pairs.values()) else {}
            for pairs in (pairing.before, pairing.after)
        )
        if lost := [str(question) for question in answered if question not in others]:
            listed = ", ".join(lost[:MAX_NUMBERS]) + ", ..." * (len(lost) > MAX_NUMBERS)
            count = f"{len(lost)} of {len(answered)} answers"
            lines.append(f"{pairing.benchmark}, {pairing.names[0]}: {count}, to the questions {listed}")
    return lines


def differing_conditions(before: EvaluationResults, after: EvaluationResults) -> list[str]:
    """One line for each condition, such as the dtype, in which the evaluations differ.

    Bases are the same if their files have the same fingerprint, and are compared by name where one has none.
    """
    old, new = before.conditions, after.conditions
    is_other = old.base != new.base
    if old.base_fingerprint and new.base_fingerprint:
        is_other = old.base_fingerprint != new.base_fingerprint
    lines = [f"base: {old.base} and {new.base}" + ", whose files differ" * (old.base == new.base)] if is_other else []
    pairs: dict[str, Any] = {name: (value, new.same()[name]) for name, value in old.same().items()}
    shared = (name for name in before.summaries if name in after.summaries)
    pairs |= {f"length cap of {name}": (old.caps.get(name), new.caps.get(name)) for name in shared}
    return lines + [f"{name}: {value} and {other}" for name, (value, other) in pairs.items() if value != other]


def difference_tables(differences: Sequence[Difference]) -> list[Table]:
    """A table for each benchmark, with a row for each figure of two evaluations; regressions are red."""
    headings = ["drafter", "figure", "questions", "before", "after", "change", "interval, %", "difference"]
    rows: dict[str, list[Row]] = {}
    for difference in differences:
        ends = difference.interval
        bounds = "–" if ends is None else " … ".join(f"{100 * end:+.1f}" for end in ends)
        cells = [difference.drafter, difference.figure, str(difference.num_questions)]
        cells += [number(difference.before), number(difference.after), f"{100 * difference.change:+.1f} %"]
        best = {7} if difference.verdict == "improvement" else set()
        row = Row([*cells, bounds, difference.verdict], best, difference.verdict != "regression")
        rows.setdefault(difference.benchmark, []).append(row)
    columns = tuple(name for name in headings if name != "questions")
    return [Table(benchmark, headings, listed, terminal=columns) for benchmark, listed in rows.items()]


def _pairings(before: EvaluationResults, after: EvaluationResults) -> list[_Pairing]:
    """The drafters of the same name; a single drafter on each side is compared whatever it is called."""
    pairings = []
    for benchmark in (name for name in before.summaries if name in after.summaries):
        names, others = (without_baseline(results.summaries[benchmark]) for results in (before, after))
        pairs = [(name, name) for name in names if name in others]
        if not pairs and len(names) == len(others) == 1:
            pairs = [(names[0], others[0])]
        for pair in pairs:
            sides = list(zip((before, after), pair, strict=True))
            old, new = (_answers(results, benchmark, name) for results, name in sides)
            errors = [results.summaries[benchmark][name].speed.timing_error for results, name in sides]
            pairings.append(_Pairing(benchmark, pair, old, new, (errors[0], errors[1])))
    return pairings


def _answers(results: EvaluationResults, benchmark: str, drafter: str) -> dict[int, tuple[Answer, Answer]]:
    """A drafter's answers and the baseline's, by question, where both are there."""
    recorded, baseline = results.answers[benchmark], results.summaries[benchmark][drafter].baseline
    by_id = {base.question_id: base for base in recorded.get(baseline, [])}
    answers = (answer for answer in recorded.get(drafter, []) if answer.question_id in by_id)
    return {answer.question_id: (answer, by_id[answer.question_id]) for answer in answers}


def _differences(pairing: _Pairing, level: float) -> Iterator[Difference]:
    """The figures that both evaluations have: each is a product of powers of sums, over the questions, of columns."""
    questions = pairing.shared
    for question in questions:
        lengths = [pairs[question][0].turns[0].prompt_tokens for pairs in (pairing.before, pairing.after)]
        if lengths[0] != lengths[1]:
            raise ValueError(
                f"{pairing.benchmark}, question {question}: its prompt has {lengths[0]} tokens in one evaluation and "
                f"{lengths[1]} in the other: compare evaluations with the same questions, template and tokenizer"
            )
    old, new = ([pairs[question] for question in questions] for pairs in (pairing.before, pairing.after))
    errors = [error for error in pairing.timing_errors if error is not None]
    quantiles = [NormalDist().inv_cdf((1 + share) / 2) for share in (level, intervals.PUBLISHED_LEVEL)]
    error = math.hypot(*errors) * quantiles[0] / quantiles[1] if len(errors) == 2 else None
    for figure, columns, powers, half_width in (
        ("acceptance length", _length_columns, (1, -1), 0.0),
        ("speed-up", _speed_columns, (1, -1, -1, 1), error),
    ):
        terms, bounds = [*columns(new), *columns(old)], None
        sums = list(map(sum, terms))
        if min(sums) <= 0:
            continue
        after, before = (math.prod(map(pow, half, powers)) for half in (sums[: len(powers)], sums[len(powers) :]))
        if half_width is not None and len(questions) >= MIN_QUESTIONS:
            bounds = intervals.interval(terms, [*powers, *(-power for power in powers)], level)
            bounds = bounds and _widened(after / before, bounds, half_width)
        name = " → ".join(dict.fromkeys(pairing.names))
        yield Difference(pairing.benchmark, name, figure, len(questions), before, after, bounds)


def _length_columns(pairs: Sequence[tuple[Answer, Answer]]) -> list[Any]:
    steps = [decode_steps(answer.turns) for answer, _ in pairs]
    return [[sum(step.emitted for step in row) for row in steps], list(map(len, steps))]


def _speed_columns(pairs: Sequence[tuple[Answer, Answer]]) -> list[Any]:
    """Seconds and tokens of the baseline, then of the drafter."""
    columns = []
    for answers in ([base for _, base in pairs], [answer for answer, _ in pairs]):
        times = MedianStepTimes([answers])
        columns += [[times.seconds(answer) for answer in answers], [count_tokens(answer.turns) for answer in answers]]
    return columns


def _widened(ratio: float, bounds: tuple[float, float], error: float) -> tuple[float, float]:
    """The interval of ``ratio - 1``, whose logarithm has an independent error of this half-width besides."""
    below = math.hypot(math.log(ratio / bounds[0]), error) if bounds[0] else math.inf
    above = math.hypot(math.log(bounds[1] / ratio), error)
    return ratio * math.exp(-below) - 1, ratio * math.exp(above) - 1
