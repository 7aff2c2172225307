"""The figures of an evaluation, as pure functions of its answers. A ratio whose denominator is 0 is None."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from statistics import median
from typing import Any

from data.templates import ReasoningMarks
from drafters.tree import common_prefix
from inference.evaluate.answers import Answer, Turn, count_tokens, decode_steps, median_answers, turns_of
from inference.evaluate.intervals import UNKNOWN, Count, Estimate, Figure, Interval, interval, quotient, ratio
from inference.evaluate.step_times import MedianStepTimes, Rounds, step_times, timing_error
from inference.verifier import session
from inference.verifier.session import Step

SHORTEST = 256  # tokens; each further range of lengths begins at twice the length

Terms = tuple[float, int, float, int]  # seconds and tokens of the baseline, then of the drafter


# ---- what is reported


@dataclass(frozen=True)
class PositionRate:
    """How often draft tokens of one position are accepted; position 1 is the first after the root."""

    rate: Estimate  # share of all steps that accept a draft token at the position (unconditional)
    conditional: Estimate  # share of the steps that accepted the position before


@dataclass(frozen=True)
class AcceptanceFigures:
    """What the steps did, prefills excluded: the same in every run."""

    length: Estimate  # acceptance length: emitted tokens / base forwards over all questions (micro average)
    mean: Estimate = UNKNOWN  # mean over questions of the acceptance length of each
    ended: Figure | None = None  # over the turns that ended with an end-of-sequence token
    fed_per_step: Figure | None = None  # mean number of tokens fed to the base per step
    scratch_per_step: Figure | None = None  # of them, those that could not be accepted
    draft_forwards_per_step: Figure | None = None  # forwards of a draft module or model
    draft_efficiency: Figure | None = None  # accepted / fed draft tokens
    accepted_per_step: Figure | None = None  # accepted draft tokens / base forwards: ANPD's alpha (section 4.5) times K
    fed_per_token: Figure | None = None  # tokens fed for each emitted token
    wasted_per_token: Figure | None = None  # of them, those that are neither a root nor accepted
    rates: list[PositionRate] = field(default_factory=list)  # by draft position, up to the last that was ever accepted
    conventions: dict[str, Figure] = field(default_factory=dict)  # the acceptance length as other tools count it


@dataclass(frozen=True)
class SpeedFigures:
    """What the clock says, prefills included: other in every run."""

    seconds: Figure  # wall time of all answers
    tokens_per_second: Figure | None
    speedup: Estimate = UNKNOWN  # the baseline's seconds per token by `MedianStepTimes` / the drafter's
    timing_error: Figure | None = None  # relative half-width of its interval on these very questions
    wall: Estimate = UNKNOWN  # the baseline's seconds of wall time per token / the drafter's
    median_seconds: Figure | None = None  # of all answers by median step times
    peak_bytes: Count | None = None  # peak of GPU memory, with the base and all drafters of the run

    @property
    def best(self) -> Estimate:
        """The speed-up by median step times; by wall time where no steps were reported."""
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
class LengthRange:
    """The steps at texts whose numbers of tokens are in one range."""

    start: Count
    end: Count  # the smallest length beyond the range
    steps: Count
    acceptance: Estimate  # acceptance length of the steps
    step_seconds: Figure  # median time of a step, see `step_times`


@dataclass(frozen=True)
class Reasoning:
    """What was accepted in the turns with reasoning; a step belongs to the part of its first emitted token."""

    turns: Count  # with reasoning; the others are in neither part
    inside_steps: Count  # in the reasoning, its marks included
    inside: Estimate  # acceptance length of these steps
    outside_steps: Count  # before and after it
    outside: Estimate


@dataclass(frozen=True)
class Summary:
    """One drafter compared with the baseline on the same questions with the same length cap."""

    drafter: str
    baseline: str
    questions: Count
    identical: Count  # questions with the baseline's tokens in every turn
    first_divergence: tuple[int, Count, Count] | None  # question id, turn and token position of the first difference
    tokens: Count
    acceptance: AcceptanceFigures
    speed: SpeedFigures
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


def summarise(rounds: Rounds, baseline: Rounds) -> Summary:
    """Compare one drafter's answers with the baseline's answers to the same questions, each of as many repeats.

    Texts and acceptance are those of the `median_answers`. Raises ValueError if an answer is missing.
    """
    answers, base_answers = median_answers(rounds), median_answers(baseline)
    if not answers:
        raise ValueError("no answers to summarise: did the run decode any question?")
    pairs = pair_answers(answers, base_answers)
    times, base_times = MedianStepTimes(rounds), MedianStepTimes(baseline)
    timed = [_terms(*pair, times.seconds(pair[0]), base_times.seconds(pair[1])) for pair in pairs]
    walls = [_terms(*pair, pair[0].seconds, pair[1].seconds) for pair in pairs]
    turns, seconds = turns_of(answers), sum(answer.seconds for answer in answers)
    speed = SpeedFigures(
        seconds=seconds,
        tokens_per_second=quotient(count_tokens(turns), seconds),
        speedup=_speedup(timed),
        timing_error=timing_error(times, base_times),
        wall=_speedup(walls),
        median_seconds=sum(map(times.seconds, answers)),
        peak_bytes=max((answer.peak_bytes for answer in answers if answer.peak_bytes is not None), default=None),
    )
    categories: dict[str, list[int]] = {}
    for index, answer in enumerate(answers):
        categories.setdefault(answer.category, []).append(index)
    by_category = {
        category: Category(
            questions=len(indices),
            identical=count_identical([pairs[index] for index in indices])["identical"],
            acceptance=acceptance_length(turns_of(answers[index] for index in indices)),
            speedup=_speedup([timed[index] for index in indices]).value,
            wall=_speedup([walls[index] for index in indices]).value,
        )
        for category, indices in categories.items()
    }
    return Summary(
        drafter=answers[0].drafter,
        baseline=base_answers[0].drafter,
        **count_identical(pairs),
        tokens=count_tokens(turns),
        acceptance=measure_acceptance(answers),
        speed=speed,
        by_category=by_category,
        by_position=length_ranges(answers),
    )


# ---- texts


def pair_answers(answers: Sequence[Answer], baseline: Sequence[Answer]) -> list[tuple[Answer, Answer]]:
    """Pair each answer with the baseline's to the same question; raises ValueError if one is missing."""
    by_id = {base.question_id: base for base in baseline}
    missing = [answer.question_id for answer in answers if answer.question_id not in by_id]
    if missing:
        raise ValueError(f"the baseline has no answer to question {missing[0]}: decode the same questions with both")
    return [(answer, by_id[answer.question_id]) for answer in answers]


def count_identical(pairs: Sequence[tuple[Answer, Answer]]) -> dict[str, Any]:
    """The fields of a `Summary` that compare texts: ``questions``, ``identical`` and ``first_divergence``."""
    places = [(answer.question_id, place) for answer, base in pairs if (place := first_difference(answer, base))]
    first = (places[0][0], *places[0][1]) if places else None
    return {"questions": len(pairs), "identical": len(pairs) - len(places), "first_divergence": first}


def first_difference(answer: Answer, baseline: Answer) -> tuple[int, int] | None:
    """Turn and token position (from zero) of the first difference of two answers; None if they are identical."""
    for index, (turn, base) in enumerate(zip_longest(answer.turns, baseline.turns)):
        tokens, base_tokens = turn.token_ids if turn else [], base.token_ids if base else []
        if tokens != base_tokens or not (turn and base):
            return index, common_prefix(tokens, base_tokens)
    return None


# ---- acceptance


def acceptance_length(turns: Iterable[Turn]) -> float | None:
    """Emitted tokens / base forwards, prefill excluded from both."""
    return session.acceptance_length(turn.steps for turn in turns)


def measure_acceptance(answers: Sequence[Answer]) -> AcceptanceFigures:
    """What the steps of the answers did."""
    turns = turns_of(answers)
    by_answer, steps = [decode_steps(answer.turns) for answer in answers], decode_steps(turns)
    lengths = [length for answer in answers if (length := acceptance_length(answer.turns)) is not None]
    return AcceptanceFigures(
        length=ratio((sum(step.emitted for step in steps), len(steps)) for steps in by_answer if steps),
        mean=ratio((length, 1) for length in lengths),
        ended=acceptance_length(turn for turn in turns if turn.is_ended),
        scratch_per_step=quotient(sum(step.fed_scratch for step in steps), len(steps)),
        draft_forwards_per_step=quotient(sum(step.draft_forwards for step in steps), len(steps)),
        rates=acceptance_rates(by_answer),
        **count_drafts([turn.steps for turn in turns]).figures(),
    )


@dataclass(frozen=True)
class DraftCounts:
    """Sums over the steps of some turns, from which every convention computes its figures; see docs/figures.md."""

    prefills: int  # one for each turn
    prefill_tokens: int  # that the prefills emitted
    steps: int  # all others
    drafting_steps: int  # those that fed draft tokens that could be accepted
    emitted: int  # tokens that the steps emitted, bonus tokens included
    accepted: int  # draft tokens that they accepted
    drafted: int  # draft tokens that they fed and could have accepted
    fed: int  # all tokens that they fed to the base

    def figures(self) -> dict[str, Any]:
        """The fields of an `AcceptanceFigures` that follow from these sums.

        Of the conventions, ours excludes the prefills; Ouroboros counts them and the tokens that they emit; SGLang
        counts these tokens, but not the prefills as steps; vLLM counts only steps with drafts, and adds 1 for the bonus
        token.
        """
        tokens, vllm = self.emitted + self.prefill_tokens, quotient(self.accepted, self.drafting_steps)
        lengths = {
            "acceptance length (drafters, Spec-Bench)": quotient(self.emitted, self.steps),
            "block efficiency (Ouroboros)": quotient(tokens, self.steps + self.prefills),
            "accept length (SGLang)": quotient(tokens, self.steps),
            "mean acceptance length (vLLM)": None if vllm is None else 1 + vllm,
        }
        return {
            "fed_per_step": quotient(self.fed, self.steps),
            "draft_efficiency": quotient(self.accepted, self.drafted),
            "accepted_per_step": quotient(self.accepted, self.steps),
            "fed_per_token": quotient(self.fed, self.emitted),
            "wasted_per_token": quotient(self.fed - self.steps - self.accepted, self.emitted),
            "conventions": {name: length for name, length in lengths.items() if length is not None},
        }


def count_drafts(turns: Sequence[Sequence[Step]]) -> DraftCounts:
    """Add up the steps of turns, the first of each being the prefill."""
    prefills = [steps[0] for steps in turns if steps]
    steps = [step for turn in turns for step in turn[1:]]
    return DraftCounts(
        prefills=len(prefills),
        prefill_tokens=sum(step.emitted for step in prefills),
        steps=len(steps),
        drafting_steps=sum(step.fed_candidates > 0 for step in steps),
        emitted=sum(step.emitted for step in steps),
        accepted=sum(step.accepted for step in steps),
        drafted=sum(step.fed_candidates for step in steps),
        fed=sum(step.fed for step in steps),
    )


def acceptance_rates(questions: Sequence[Sequence[Step]]) -> list[PositionRate]:
    """The acceptance rate of each draft position, up to the last that any step of the questions ever accepted."""
    deepest = max((step.accepted for steps in questions for step in steps), default=0)
    reached = []  # at each depth, the number of steps of each question that accepted as many draft tokens
    for depth in range(deepest + 1):
        reached.append([sum(step.accepted >= depth for step in steps) for steps in questions])
    return [
        PositionRate(ratio(zip(now, reached[0], strict=True)), ratio(zip(now, before, strict=True)))
        for before, now in pairwise(reached)
    ]


def length_ranges(answers: Sequence[Answer]) -> list[LengthRange]:
    """The steps by the position after the root when they begin; ranges without any are left out."""
    groups: dict[int, dict[int, list[tuple[Step, float]]]] = {}  # the steps of each question, by range
    for question, answer in enumerate(answers):
        for turn in (turn for turn in answer.turns if turn.steps):
            (prefill, _), *steps = step_times(turn)
            length = turn.prompt_tokens + prefill.emitted
            for step, seconds in steps:
                groups.setdefault(range_start(length), {}).setdefault(question, []).append((step, seconds))
                length += step.emitted
    ranges = []
    for start, by_question in sorted(groups.items()):
        times = [seconds for steps in by_question.values() for _, seconds in steps]
        terms = [(sum(step.emitted for step, _ in steps), len(steps)) for steps in by_question.values()]
        ranges.append(LengthRange(start, max(SHORTEST, 2 * start), len(times), ratio(terms), median(times)))
    return ranges


def range_start(length: int) -> int:
    """The smallest length of the range that a length is in: 0, 256, 512, 1,024, ...

    >>> [range_start(length) for length in (255, 256, 511, 5000)]
    [0, 256, 256, 4096]
    """
    return 0 if length < SHORTEST else 1 << (length.bit_length() - 1)


def reasoning(answers: Sequence[Answer], marks: ReasoningMarks | None) -> Reasoning | None:
    """Acceptance apart for the reasoning and for the rest of the answers; None if no turn with steps has reasoning."""
    parts: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # emitted tokens and steps of each question
    num_turns = 0
    for answer in answers if marks else ():
        emitted: dict[bool, list[int]] = {True: [], False: []}  # by each step
        for turn in (turn for turn in answer.turns if turn.steps):
            if marks and (span := marks.span(turn.token_ids)):
                num_turns, position = num_turns + 1, turn.steps[0].emitted
                for step in turn.steps[1:]:
                    emitted[span[0] <= position < span[1]].append(step.emitted)
                    position += step.emitted
        for is_inside, counts in emitted.items():
            parts[is_inside] += [(sum(counts), len(counts))] if counts else []
    if not num_turns:
        return None
    steps = {is_inside: sum(count for _, count in terms) for is_inside, terms in parts.items()}
    return Reasoning(num_turns, steps[True], ratio(parts[True]), steps[False], ratio(parts[False]))


# ---- times


def _terms(answer: Answer, base: Answer, seconds: float, base_seconds: float) -> Terms:
    return base_seconds, count_tokens(base.turns), seconds, count_tokens(answer.turns)


def _speedup(terms: Sequence[Terms]) -> Estimate:
    base_seconds, base_tokens, seconds, tokens = map(sum, zip(*terms, strict=True))
    if not (base_seconds and base_tokens and seconds and tokens):
        return UNKNOWN
    columns = list(zip(*(row for row in terms if all(row[1:])), strict=True))
    bounds = interval(columns, (1, -1, -1, 1)) if columns else None
    return Estimate((base_seconds / base_tokens) / (seconds / tokens), bounds)
