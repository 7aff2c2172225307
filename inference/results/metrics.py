"""Metrics of an evaluation, as pure functions of the recorded answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Protocol

import numpy as np

from inference.results import intervals
from inference.results.draft_figures import DraftFigures, acceptance_by_depth, draft_figures
from inference.results.length_figures import LengthFigures, LengthSeconds, length_figures
from inference.results.reasoning_figures import ReasoningFigures
from inference.results.records import Answer, Turn
from inference.results.served_figures import ServedFigures
from inference.results.step_times import TypicalTimes, timing_error
from inference.verifier.session import PHASES, StepCost

# Fields of `Summary` and `CategorySummary` that contain times or memory; all others are the same in every run.
MEASURED = {
    *("seconds", "tokens_per_second", "speedup", "speedup_interval", "timing_error"),
    *("wall_speedup", "wall_speedup_interval", "speedup_median", "noise"),
    *("phase_seconds", "typical_seconds", "cpu_seconds", "core_share", "peak_bytes", "length_seconds", "served"),
}

Repeat = tuple[Sequence[Answer], Sequence[Answer]]  # a drafter's answers, and the baseline's


class Decoded(Protocol):
    """Any decoded text with the cost of its steps: a recorded turn, or what a session or `generate` returns."""

    @property
    def steps(self) -> Sequence[StepCost]: ...


@dataclass(frozen=True)
class TimedPair:
    """A drafter's answer and the baseline's to the same question, with the seconds that each took."""

    answer: Answer
    base: Answer
    seconds: float
    base_seconds: float


@dataclass(frozen=True)
class CategorySummary:
    """One drafter on the questions of one category, with the fields of `Summary`; ``identical`` is a share."""

    questions: int
    acceptance_length: float | None
    speedup: float | None
    tokens_per_second: float | None
    identical: float
    wall_speedup: float | None


@dataclass(frozen=True)
class Summary:
    """One drafter compared with the baseline on the same questions with the same length cap.

    A ratio whose denominator is zero is None. Intervals are 95 % confidence intervals over questions, see `intervals`.

    Args:
        drafter: Name of the drafter.
        baseline: Name of the drafter that it is compared with.
        questions: Number of questions answered.
        identical: Number of questions with the baseline's tokens in every turn.
        first_divergence: Question id, turn and token position (from zero) of the first difference.
        tokens: Number of tokens of all answers.
        seconds: Wall time of all answers.
        acceptance_length: Emitted tokens / base forwards, prefill excluded, over all questions (micro average).
        acceptance_interval: Interval of the acceptance length.
        acceptance_length_with_prefill: Emitted tokens / base forwards, counting the prefill and the token it emits: the
            block efficiency of Ouroboros (Definition C.1), and what Self-Draft calls decoding efficiency.
        acceptance_length_mean: Mean over questions of the acceptance length of each, prefill excluded.
        acceptance_mean_interval: Interval of that mean.
        acceptance_length_ended: Acceptance length over the turns that ended with an end-of-sequence token.
        fed_per_step: Mean number of tokens fed to the base per step, prefill excluded.
        scratch_per_step: Mean number of scratch tokens among them, which cannot be accepted.
        draft_forwards_per_step: Mean number of forwards of a draft module or model per step, prefill excluded.
        draft_hit_ratio: Accepted / fed draft tokens, prefill excluded (ANPD's alpha, section 4.5).
        tokens_per_second: Tokens / seconds, prefill included.
        speedup: The baseline's typical seconds per token / the drafter's, over all questions, prefill included; other
            work on the machine hardly changes it. `TypicalTimes` says what typical seconds are.
        speedup_interval: Interval of the speed-up.
        timing_error: Relative half-width of the interval of the speed-up on these very questions: see `timing_error`.
        wall_speedup: The baseline's seconds of wall time per token / the drafter's, over all questions, prefill
            included.
        wall_speedup_interval: Interval of that speed-up.
        speedup_median: Median over questions of the wall speed-up of each.
        noise: Relative standard deviation that the wall speed-up would have over several runs: see `noise`.
        acceptance_by_depth: Share of the steps that accept at least 1, 2, ... draft tokens, prefill excluded.
        phase_seconds: Seconds by phase (CTC paper, Figure 3), prefill excluded, followed by ``prefill`` and ``other``;
            together they are all seconds.
        typical_seconds: Typical seconds of all answers.
        cpu_seconds: CPU time of the process during all answers, over all its threads.
        core_share: Share of the wall time in which the decoding thread had a core; below 1, it waited for one.
        peak_bytes: Peak of allocated GPU memory, including the base and all drafters of the run; None on a CPU.
        by_category: The most important metrics for each category.
        quality: Task quality in percent, as `quality.score` measures it.
        draft_tokens: What became of the draft tokens; None in results of older versions.
        lengths: Acceptance length by position in the context and by length of the prompt; None in results of older
            versions.
        length_seconds: Median times of the same steps.
        reasoning: What was accepted in reasoning and in the rest of the answers, where the template's marks occur.
        served: What only a server has; None for answers of our own decoding loop.
    """

    drafter: str
    baseline: str
    questions: int
    identical: int
    first_divergence: tuple[int, int, int] | None
    tokens: int
    seconds: float
    acceptance_length: float | None
    acceptance_interval: tuple[float, float] | None
    acceptance_length_with_prefill: float | None
    acceptance_length_mean: float | None
    acceptance_mean_interval: tuple[float, float] | None
    acceptance_length_ended: float | None
    fed_per_step: float | None
    scratch_per_step: float | None
    draft_forwards_per_step: float | None
    draft_hit_ratio: float | None
    tokens_per_second: float | None
    speedup: float | None
    speedup_interval: tuple[float, float] | None
    timing_error: float | None
    wall_speedup: float | None
    wall_speedup_interval: tuple[float, float] | None
    speedup_median: float | None
    noise: float | None
    acceptance_by_depth: list[float]
    phase_seconds: dict[str, float]
    typical_seconds: float | None
    cpu_seconds: float | None
    core_share: float | None
    peak_bytes: int | None
    by_category: dict[str, CategorySummary]
    quality: dict[str, float] = field(default_factory=dict)
    draft_tokens: DraftFigures | None = None
    lengths: LengthFigures | None = None
    length_seconds: LengthSeconds | None = None
    reasoning: ReasoningFigures | None = None
    served: ServedFigures | None = None

    @property
    def is_baseline(self) -> bool:
        """Whether this is the baseline itself."""
        return self.drafter == self.baseline


def summarise(answers: Sequence[Answer], baseline: Sequence[Answer], repeats: Sequence[Repeat] = ()) -> Summary:
    """Compare one drafter's answers with the baseline's answers to the same questions.

    Args:
        answers: One answer to each question; of several repeats, the `records.median_answers`.
        baseline: The baseline's answers.
        repeats: The answers of both in each repeat, if there was more than one.

    Raises:
        ValueError: There are no answers, or the baseline did not answer a question.
    """
    if not answers:
        raise ValueError("no answers to summarise: did the run decode any question?")
    pairs = pair_answers(answers, baseline)
    turns, base_turns = _turns(answers), _turns(base for _, base in pairs)
    steps = decode_steps(turns)
    lengths = [length for answer in answers if (length := acceptance_length(answer.turns)) is not None]
    ended = [turn for answer in answers for turn, is_ended in zip(answer.turns, answer.ended, strict=True) if is_ended]
    ratios = [ratio for answer, base in pairs if (ratio := wall_speedup(answer.turns, base.turns)) is not None]
    divergences = [(answer, place) for answer, base in pairs if (place := first_difference(answer, base)) is not None]
    counts = [(sum(step.emitted for step in own), len(own)) for own in (decode_steps(a.turns) for a in answers) if own]
    repeats = repeats or [(answers, [base for _, base in pairs])]
    own_times, base_times = (TypicalTimes(each) for each in zip(*repeats, strict=True))
    timed = [TimedPair(answer, base, own_times.seconds(answer), base_times.seconds(base)) for answer, base in pairs]
    walls = [TimedPair(answer, base, answer.seconds, base.seconds) for answer, base in pairs]
    shares = [(answer.core_share * answer.seconds, answer.seconds) for answer in answers if answer.core_share]
    peaks = [answer.peak_bytes for answer in answers if answer.peak_bytes is not None]
    by_length, length_seconds = length_figures(answers)
    return Summary(
        drafter=answers[0].drafter,
        baseline=baseline[0].drafter,
        questions=len(answers),
        identical=len(answers) - len(divergences),
        first_divergence=(divergences[0][0].question_id, *divergences[0][1]) if divergences else None,
        tokens=_tokens(turns),
        seconds=_seconds(turns),
        acceptance_length=acceptance_length(turns),
        acceptance_interval=_interval(counts, (1, -1)),
        acceptance_length_with_prefill=_ratio(_tokens(turns), sum(len(turn.steps) for turn in turns)),
        acceptance_length_mean=_ratio(sum(lengths), len(lengths)),
        acceptance_mean_interval=_interval([(length, 1) for length in lengths], (1, -1)),
        acceptance_length_ended=acceptance_length(ended),
        fed_per_step=_ratio(sum(step.fed for step in steps), len(steps)),
        scratch_per_step=_ratio(sum(step.fed_scratch for step in steps), len(steps)),
        draft_forwards_per_step=_ratio(sum(step.draft_forwards for step in steps), len(steps)),
        draft_hit_ratio=_ratio(sum(step.accepted for step in steps), sum(step.fed_candidates for step in steps)),
        tokens_per_second=_ratio(_tokens(turns), _seconds(turns)),
        speedup=speedup(timed),
        speedup_interval=_speedup_interval(timed),
        timing_error=timing_error(own_times, base_times),
        wall_speedup=wall_speedup(turns, base_turns),
        wall_speedup_interval=_speedup_interval(walls),
        speedup_median=float(np.median(ratios)) if ratios else None,
        noise=noise(repeats),
        acceptance_by_depth=acceptance_by_depth(steps),
        phase_seconds=phase_seconds(turns),
        typical_seconds=sum(pair.seconds for pair in timed),
        cpu_seconds=sum(known) if (known := [a.cpu_seconds for a in answers if a.cpu_seconds is not None]) else None,
        core_share=_ratio(*map(sum, zip(*shares, strict=True))) if shares else None,
        peak_bytes=max(peaks, default=None),
        by_category={
            category: _summarise_category([pair for pair in timed if pair.answer.category == category])
            for category in dict.fromkeys(answer.category for answer in answers)
        },
        draft_tokens=draft_figures([[turn.steps for turn in answer.turns] for answer in answers]),
        lengths=by_length,
        length_seconds=length_seconds,
    )


def decode_steps(turns: Iterable[Decoded]) -> list[StepCost]:
    """All steps except the prefill, which is the first step of each turn."""
    return [step for turn in turns for step in turn.steps[1:]]


def acceptance_length(turns: Iterable[Decoded]) -> float | None:
    """Emitted tokens / base forwards, prefill excluded from both."""
    steps = decode_steps(turns)
    return _ratio(sum(step.emitted for step in steps), len(steps))


def speedup(pairs: Sequence[TimedPair]) -> float | None:
    """The baseline's seconds per token / the drafter's, prefill included."""
    columns = [sum(column) for column in zip(*map(_terms, pairs), strict=True)]
    if not all(columns):
        return None
    base_seconds, base_tokens, seconds, tokens = columns
    return (base_seconds / base_tokens) / (seconds / tokens)


def wall_speedup(turns: Sequence[Turn], baseline: Sequence[Turn]) -> float | None:
    """The baseline's seconds of wall time per token / the drafter's, prefill included."""
    ours, theirs = _ratio(_seconds(turns), _tokens(turns)), _ratio(_seconds(baseline), _tokens(baseline))
    return _ratio(theirs, ours) if ours and theirs else None


def first_difference(answer: Answer, baseline: Answer) -> tuple[int, int] | None:
    """Turn and token position (from zero) of the first difference of two answers; None if they are identical."""
    for index, (turn, base) in enumerate(zip_longest(answer.turns, baseline.turns)):
        tokens, base_tokens = turn.token_ids if turn else [], base.token_ids if base else []
        if tokens != base_tokens or not (turn and base):
            parts = (at for at, (ours, its) in enumerate(zip(tokens, base_tokens, strict=False)) if ours != its)
            return index, next(parts, min(len(tokens), len(base_tokens)))
    return None


def phase_seconds(turns: Sequence[Turn]) -> dict[str, float]:
    """Seconds of each of `PHASES` without the prefills, followed by ``prefill`` and ``other``, the rest of the time."""
    steps = decode_steps(turns)
    seconds = {phase: sum(step.seconds[index] for step in steps) for index, phase in enumerate(PHASES)}
    seconds["prefill"] = sum(sum(turn.steps[0].seconds) for turn in turns if turn.steps)
    seconds["other"] = _seconds(turns) - sum(seconds.values())
    return seconds


def noise(repeats: Sequence[Repeat]) -> float | None:
    """Relative standard deviation that the speed-up would have over several runs; None if it cannot be estimated.

    For the baseline it is that of its tokens per second. With several repeats it is their own standard deviation, which
    is larger than that of the reported median. With one repeat it is the standard error over questions of the time of a
    base forward relative to the baseline's; as this also contains real differences between questions, it is an upper
    estimate. Neither notices what slows down a whole run evenly.
    """
    is_baseline = repeats[0][0][0].drafter == repeats[0][1][0].drafter
    if len(repeats) > 1:
        speeds = [
            _ratio(_tokens(turns), _seconds(turns)) if is_baseline else wall_speedup(turns, _turns(base))
            for turns, base in ((_turns(answers), base) for answers, base in repeats)
        ]
        known = [speed for speed in speeds if speed]
        return intervals.relative_deviation(known) if len(known) == len(speeds) else None
    pairs = [
        (seconds_per_step(answer.turns), 1.0 if is_baseline else seconds_per_step(base.turns))
        for answer, base in pair_answers(*repeats[0])
    ]
    return intervals.standard_error([own / base for own, base in pairs if own and base])


def seconds_per_step(turns: Sequence[Turn]) -> float | None:
    """Mean time of a step, prefill excluded."""
    steps = decode_steps(turns)
    return _ratio(sum(sum(step.seconds) for step in steps), len(steps))


def pair_answers(answers: Sequence[Answer], baseline: Sequence[Answer]) -> list[tuple[Answer, Answer]]:
    """Pair each answer with the baseline's to the same question; raises ValueError if one is missing."""
    by_id = {base.question_id: base for base in baseline}
    missing = [answer.question_id for answer in answers if answer.question_id not in by_id]
    if missing:
        raise ValueError(f"the baseline has no answer to question {missing[0]}: decode the same questions with both")
    return [(answer, by_id[answer.question_id]) for answer in answers]


def _summarise_category(pairs: Sequence[TimedPair]) -> CategorySummary:
    turns, base_turns = _turns(pair.answer for pair in pairs), _turns(pair.base for pair in pairs)
    return CategorySummary(
        questions=len(pairs),
        acceptance_length=acceptance_length(turns),
        speedup=speedup(pairs),
        tokens_per_second=_ratio(_tokens(turns), _seconds(turns)),
        identical=sum(first_difference(pair.answer, pair.base) is None for pair in pairs) / len(pairs),
        wall_speedup=wall_speedup(turns, base_turns),
    )


def _terms(pair: TimedPair) -> tuple[float, int, float, int]:
    """Seconds and tokens of the baseline, then of the drafter."""
    return pair.base_seconds, _tokens(pair.base.turns), pair.seconds, _tokens(pair.answer.turns)


def _speedup_interval(pairs: Sequence[TimedPair]) -> tuple[float, float] | None:
    return _interval([terms for pair in pairs if all((terms := _terms(pair))[1:])], (1, -1, -1, 1))


def _interval(rows: Sequence[Sequence[float]], powers: Sequence[int]) -> tuple[float, float] | None:
    return intervals.interval(list(zip(*rows, strict=True)), powers) if rows else None


def _turns(answers: Iterable[Answer]) -> list[Turn]:
    return [turn for answer in answers for turn in answer.turns]


def _tokens(turns: Iterable[Turn]) -> int:
    return sum(len(turn.token_ids) for turn in turns)


def _seconds(turns: Iterable[Turn]) -> float:
    return sum(turn.seconds for turn in turns)


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
