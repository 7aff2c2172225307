"""The figures of an evaluation, as pure functions of the recorded answers. A ratio whose denominator is 0 is None."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from inference.evaluate import breakdowns, intervals
from inference.evaluate.answers import Answer, Turn
from inference.evaluate.breakdowns import LengthRange, PositionRate, Reasoning
from inference.evaluate.intervals import UNKNOWN, Count, Estimate, Figure, Interval, quotient
from inference.evaluate.step_times import MedianStepTimes, timing_error
from inference.verifier import session
from inference.verifier.session import PHASES, Step

Pair = tuple[Answer, Answer]  # a drafter's answer, and the baseline's to the same question
Repeat = tuple[Sequence[Answer], Sequence[Answer]]  # a drafter's answers, and the baseline's
Terms = tuple[float, int, float, int]  # seconds and tokens of the baseline, then of the drafter


@dataclass(frozen=True)
class Acceptance:
    """What the steps did, prefills excluded: the same in every run."""

    length: Estimate  # acceptance length: emitted tokens / base forwards over all questions (micro average)
    mean: Estimate = UNKNOWN  # mean over questions of the acceptance length of each
    ended: Figure | None = None  # over the turns that ended with an end-of-sequence token
    fed_per_step: Figure | None = None  # mean number of tokens fed to the base per step
    scratch_per_step: Figure | None = None  # of them, those that could not be accepted
    draft_forwards_per_step: Figure | None = None  # forwards of a draft module or model
    hit_ratio: Figure | None = None  # accepted / fed draft tokens, the draft efficiency
    accepted_per_step: Figure | None = None  # accepted draft tokens / base forwards: ANPD's alpha (section 4.5) times K
    fed_per_token: Figure | None = None  # tokens fed for each emitted token
    wasted_per_token: Figure | None = None  # of them, those that are neither a root nor accepted
    rates: list[PositionRate] = field(default_factory=list)  # by draft position, up to the last that was ever accepted
    conventions: dict[str, Figure] = field(default_factory=dict)  # the acceptance length as other tools count it


@dataclass(frozen=True)
class Speed:
    """What the clock says, prefills included: other in every run."""

    seconds: Figure  # wall time of all answers
    tokens_per_second: Figure | None
    speedup: Estimate = UNKNOWN  # the baseline's seconds per token by `MedianStepTimes` / the drafter's
    timing_error: Figure | None = None  # relative half-width of its interval on these very questions
    wall: Estimate = UNKNOWN  # the baseline's seconds of wall time per token / the drafter's
    median_seconds: Figure | None = None  # of all answers by median step times
    peak_bytes: Count | None = None  # peak of GPU memory, with the base and all drafters of the run
    # Of `PHASES`, prefill and the rest; together all seconds.
    phase_seconds: dict[str, Figure] = field(default_factory=dict)

    @property
    def best(self) -> Estimate:
        """The speed-up by median step times; by wall time where there are no steps, as from a server."""
        return self.wall if self.speedup.value is None else self.speedup


@dataclass(frozen=True)
class Latency:
    """What clients of a server see: median and 95th percentile of seconds, interpolated linearly."""

    first_token: Interval | None  # from a request to the first token of its answer
    inter_token: Interval | None  # between two tokens; None if the server does not say what an event holds


@dataclass(frozen=True)
class Category:
    """One drafter on the questions of one category, with the figures of `Summary`."""

    questions: Count
    identical: Count
    acceptance: Figure | None
    speedup: Figure | None
    wall: Figure | None


@dataclass(frozen=True)
class Summary:
    """One drafter compared with the baseline on the same questions with the same length cap."""

    drafter: str
    baseline: str
    questions: Count
    identical: Count  # questions with the baseline's tokens in every turn
    first_divergence: tuple[int, Count, Count] | None  # question id, turn and token position of the first difference
    tokens: Count
    acceptance: Acceptance
    speed: Speed
    by_category: dict[str, Category] = field(default_factory=dict)
    by_position: list[LengthRange] = field(default_factory=list)  # by position in the context
    quality: dict[str, Figure] = field(default_factory=dict)  # in percent, as the benchmark scores it
    reasoning: Reasoning | None = None
    concurrency: Count | None = None  # number of requests at once, if a server was asked
    latency: Latency | None = None

    def __post_init__(self) -> None:
        if not self.identical <= self.questions > 0:
            raise ValueError(f"{self.identical} of {self.questions} answers cannot be identical")

    @property
    def is_baseline(self) -> bool:
        """Whether this is the baseline itself."""
        return self.drafter == self.baseline

    @property
    def name(self) -> str:
        """The name in tables: that of the drafter, with the number of requests at once in a server."""
        return self.drafter if self.concurrency is None else f"{self.drafter} @ {self.concurrency}"


def summarise(answers: Sequence[Answer], baseline: Sequence[Answer], repeats: Sequence[Repeat] = ()) -> Summary:
    """Compare one drafter's answers with the baseline's answers to the same questions; ValueError if one is missing.

    There is one answer to each question: of several repeats, whose answers are ``repeats``, the `median_answers`.
    """
    if not answers:
        raise ValueError("no answers to summarise: did the run decode any question?")
    pairs = pair_answers(answers, baseline)
    repeats = repeats or [(answers, [base for _, base in pairs])]
    own_times, base_times = (MedianStepTimes(each) for each in zip(*repeats, strict=True))
    timed = [_terms(*pair, base_times.seconds(pair[1]), own_times.seconds(pair[0])) for pair in pairs]
    walls = [_terms(*pair, pair[1].seconds, pair[0].seconds) for pair in pairs]
    rows: dict[str, list[tuple[Pair, Terms, Terms]]] = {}
    for row in zip(pairs, timed, walls, strict=True):
        rows.setdefault(row[0][0].category, []).append(row)
    return Summary(
        drafter=answers[0].drafter,
        baseline=baseline[0].drafter,
        **count_identical(pairs),
        tokens=_tokens(turns_of(answers)),
        acceptance=_acceptance(answers),
        speed=_speed(answers, timed, walls, timing_error(own_times, base_times)),
        by_category={category: _category(*zip(*own, strict=True)) for category, own in rows.items()},
        by_position=breakdowns.length_ranges(answers),
    )


def _acceptance(answers: Sequence[Answer]) -> Acceptance:
    turns = turns_of(answers)
    steps, counts = decode_steps(turns), breakdowns.count_drafts([turn.steps for turn in turns])
    lengths = [length for answer in answers if (length := acceptance_length(answer.turns)) is not None]
    ended = [turn for answer in answers for turn, is_ended in zip(answer.turns, answer.ended, strict=True) if is_ended]
    own_steps = [decode_steps(answer.turns) for answer in answers]
    return Acceptance(
        length=intervals.ratio((sum(step.emitted for step in own), len(own)) for own in own_steps if own),
        mean=intervals.ratio((length, 1) for length in lengths),
        ended=acceptance_length(ended),
        scratch_per_step=quotient(sum(step.fed_scratch for step in steps), len(steps)),
        draft_forwards_per_step=quotient(sum(step.draft_forwards for step in steps), len(steps)),
        rates=breakdowns.acceptance_rates(own_steps),
        **counts.figures(),
    )


def decode_steps(turns: Iterable[Turn]) -> list[Step]:
    """All steps except the prefill, which is the first step of each turn."""
    return [step for turn in turns for step in turn.steps[1:]]


def acceptance_length(turns: Iterable[Turn]) -> float | None:
    """Emitted tokens / base forwards, prefill excluded from both."""
    return session.acceptance_length(turn.steps for turn in turns)


# ---- texts


def pair_answers(answers: Sequence[Answer], baseline: Sequence[Answer]) -> list[Pair]:
    """Pair each answer with the baseline's to the same question; raises ValueError if one is missing."""
    by_id = {base.question_id: base for base in baseline}
    missing = [answer.question_id for answer in answers if answer.question_id not in by_id]
    if missing:
        raise ValueError(f"the baseline has no answer to question {missing[0]}: decode the same questions with both")
    return [(answer, by_id[answer.question_id]) for answer in answers]


def count_identical(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The fields of a `Summary` that compare texts: ``questions``, ``identical`` and ``first_divergence``."""
    places = [(answer.question_id, place) for answer, base in pairs if (place := first_difference(answer, base))]
    first = (places[0][0], *places[0][1]) if places else None
    return {"questions": len(pairs), "identical": len(pairs) - len(places), "first_divergence": first}


def first_difference(answer: Answer, baseline: Answer) -> tuple[int, int] | None:
    """Turn and token position (from zero) of the first difference of two answers; None if they are identical."""
    for index, (turn, base) in enumerate(zip_longest(answer.turns, baseline.turns)):
        tokens, base_tokens = turn.token_ids if turn else [], base.token_ids if base else []
        if tokens != base_tokens or not (turn and base):
            return index, session.common_prefix(tokens, base_tokens)
    return None


# ---- times


def _terms(answer: Answer, base: Answer, base_seconds: float, seconds: float) -> Terms:
    return base_seconds, _tokens(base.turns), seconds, _tokens(answer.turns)


def _speed(answers: Sequence[Answer], timed: Sequence[Terms], walls: Sequence[Terms], error: float | None) -> Speed:
    turns = turns_of(answers)
    return Speed(
        seconds=_seconds(turns),
        tokens_per_second=quotient(_tokens(turns), _seconds(turns)),
        speedup=Estimate(_speedup(timed), _interval(timed)),
        timing_error=error,
        wall=Estimate(_speedup(walls), _interval(walls)),
        median_seconds=sum(seconds for *_, seconds, _ in timed),
        peak_bytes=max((answer.peak_bytes for answer in answers if answer.peak_bytes is not None), default=None),
        phase_seconds=_phase_seconds(turns),
    )


def _speedup(terms: Sequence[Terms]) -> float | None:
    base_seconds, base_tokens, seconds, tokens = map(sum, zip(*terms, strict=True))
    is_known = base_seconds and base_tokens and seconds and tokens
    return (base_seconds / base_tokens) / (seconds / tokens) if is_known else None


def _interval(timed: Sequence[Terms]) -> tuple[float, float] | None:
    rows = [terms for terms in timed if all(terms[1:])]
    return intervals.interval(list(zip(*rows, strict=True)), (1, -1, -1, 1)) if rows else None


def _phase_seconds(turns: Sequence[Turn]) -> dict[str, float]:
    """Seconds of each of `PHASES` without the prefills, followed by ``prefill`` and ``other``, the rest of the time."""
    steps = decode_steps(turns)
    seconds = {phase: sum(step.seconds[index] for step in steps) for index, phase in enumerate(PHASES)}
    seconds["prefill"] = sum(sum(turn.steps[0].seconds) for turn in turns if turn.steps)
    seconds["other"] = max(0.0, _seconds(turns) - sum(seconds.values()))
    return seconds


def _category(pairs: Sequence[Pair], timed: Sequence[Terms], walls: Sequence[Terms]) -> Category:
    length = acceptance_length(turns_of(answer for answer, _ in pairs))
    return Category(len(pairs), count_identical(pairs)["identical"], length, _speedup(timed), _speedup(walls))


def turns_of(answers: Iterable[Answer]) -> list[Turn]:
    """All turns of the answers."""
    return [turn for answer in answers for turn in answer.turns]


def _tokens(turns: Iterable[Turn]) -> int:
    return sum(len(turn.token_ids) for turn in turns)


def _seconds(turns: Iterable[Turn]) -> float:
    return sum(turn.seconds for turn in turns)
