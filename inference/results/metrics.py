"""The numbers of an evaluation, as pure functions over recorded answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from inference.engine.session import PHASES, StepCost
from inference.results import intervals
from inference.results.records import Answer, Turn

# Fields of `Summary` and `CategorySummary` that differ from run to run; all others are the same on the same machine.
MEASURED = {
    *("seconds", "tokens_per_second", "speedup", "speedup_interval", "speedup_median", "noise"),
    *("phase_seconds", "peak_bytes"),
}

Repeat = tuple[Sequence[Answer], Sequence[Answer]]  # a drafter's answers, and the baseline's


@dataclass(frozen=True)
class CategorySummary:
    """One drafter on the questions of one category; fields as in `Summary`, ``identical`` as a share."""

    questions: int
    acceptance_length: float | None
    speedup: float | None
    tokens_per_second: float | None
    identical: float


@dataclass(frozen=True)
class Summary:
    """One drafter beside the baseline on the same questions, with the same length cap. A ratio of nothing is None.

    Intervals are 95 % ones of `statistics.interval`, when the questions are resampled.

    Args:
        drafter: Name of the drafter.
        baseline: Name of the drafter it is compared with.
        questions: Questions answered.
        identical: Questions whose every turn has the baseline's tokens.
        first_divergence: Question id, turn and token position (from zero) of the first difference.
        tokens: Tokens of all answers.
        seconds: Wall time of all answers.
        acceptance_length: Emitted tokens / base forwards, prefill excluded, micro average.
        acceptance_interval: Its interval.
        acceptance_length_with_prefill: Emitted tokens / base forwards, the prefill and what it emits counted; decoding
            efficiency in the Self-Draft paper, block efficiency in Ouroboros' (Definition C.1), which calls it the
            speed-up if drafting took no time.
        acceptance_length_mean: Mean over questions of the one without prefill.
        acceptance_mean_interval: Its interval.
        acceptance_length_ended: Its micro average over the turns that ended with an end-of-sequence token.
        fed_per_step: Mean number of tokens fed to the base, prefill excluded.
        scratch_per_step: Those of them that were fed only to be looked at.
        draft_forwards_per_step: Forwards of a draft module or model, prefill excluded.
        draft_hit_ratio: Accepted / fed draft tokens, prefill excluded (ANPD's alpha, section 4.5).
        tokens_per_second: Tokens / seconds, prefill included.
        speedup: The baseline's seconds per token / ours, all questions together, prefill included.
        speedup_interval: Its interval.
        speedup_median: Median of the same over questions.
        noise: What another run's speed-up may differ by, as a relative standard deviation: see `noise`.
        acceptance_by_depth: Share of steps that accept at least 1, 2, ... draft tokens, prefill excluded.
        phase_seconds: Seconds by phase (CTC paper, Figure 3), prefill excluded; then ``prefill`` and ``other``, so that
            they add up.
        peak_bytes: GPU memory allocated at most, the base and every drafter of the run included; None on a CPU.
        by_category: The same in short for each category.
        quality: What `quality.score` makes of the answers, in percent.
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
    speedup_median: float | None
    noise: float | None
    acceptance_by_depth: list[float]
    phase_seconds: dict[str, float]
    peak_bytes: int | None
    by_category: dict[str, CategorySummary]
    quality: dict[str, float] = field(default_factory=dict)

    @property
    def is_baseline(self) -> bool:
        """Whether this is the baseline itself."""
        return self.drafter == self.baseline


def summarise(answers: Sequence[Answer], baseline: Sequence[Answer], repeats: Sequence[Repeat] = ()) -> Summary:
    """Compare one drafter's answers with the baseline's answers to the same questions.

    Args:
        answers: One to each question; of several, the one of `middle` time.
        baseline: The same of the baseline.
        repeats: Every time both answered all the questions, where they did so more than once.

    Raises:
        ValueError: There are no answers, or the baseline did not answer a question.
    """
    if not answers:
        raise ValueError("no answers to summarise: did the run decode any question?")
    pairs = _pair(answers, baseline)
    turns, base_turns = _turns(answers), _turns(base for _, base in pairs)
    steps = decode_steps(turns)
    lengths = [length for answer in answers if (length := acceptance_length(answer.turns)) is not None]
    ended = [turn for answer in answers for turn, is_ended in zip(answer.turns, answer.ended, strict=True) if is_ended]
    ratios = [ratio for answer, base in pairs if (ratio := speedup(answer.turns, base.turns)) is not None]
    divergences = [(answer, place) for answer, base in pairs if (place := first_difference(answer, base)) is not None]
    counts = [(sum(step.emitted for step in own), len(own)) for own in (decode_steps(a.turns) for a in answers) if own]
    times = [
        (base.seconds, _tokens(base.turns), answer.seconds, _tokens(answer.turns))
        for answer, base in pairs
        if answer.seconds and _tokens(answer.turns) and _tokens(base.turns)
    ]
    peaks = [answer.peak_bytes for answer in answers if answer.peak_bytes is not None]
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
        speedup=speedup(turns, base_turns),
        speedup_interval=_interval(times, (1, -1, -1, 1)),
        speedup_median=float(np.median(ratios)) if ratios else None,
        noise=noise(repeats or [(answers, [base for _, base in pairs])]),
        acceptance_by_depth=acceptance_by_depth(steps),
        phase_seconds=phase_seconds(turns),
        peak_bytes=max(peaks, default=None),
        by_category={
            category: _summarise_category([pair for pair in pairs if pair[0].category == category])
            for category in dict.fromkeys(answer.category for answer in answers)
        },
    )


def decode_steps(turns: Iterable[Turn]) -> list[StepCost]:
    """Every step but each turn's first, the prefill."""
    return [step for turn in turns for step in turn.steps[1:]]


def acceptance_length(turns: Iterable[Turn]) -> float | None:
    """Emitted tokens / base forwards, prefill excluded from both."""
    steps = decode_steps(turns)
    return _ratio(sum(step.emitted for step in steps), len(steps))


def acceptance_by_depth(steps: Sequence[StepCost]) -> list[float]:
    """Share of the steps that accept at least d draft tokens, for d = 1, 2, ... up to the most accepted."""
    deepest = max((step.accepted for step in steps), default=0)
    return [sum(step.accepted >= depth for step in steps) / len(steps) for depth in range(1, deepest + 1)]


def speedup(turns: Sequence[Turn], baseline: Sequence[Turn]) -> float | None:
    """The baseline's seconds per token / ours, prefill included; with identical answers a ratio of times."""
    ours, theirs = _ratio(_seconds(turns), _tokens(turns)), _ratio(_seconds(baseline), _tokens(baseline))
    return _ratio(theirs, ours) if ours and theirs else None


def first_difference(answer: Answer, baseline: Answer) -> tuple[int, int] | None:
    """Turn and token position (from zero) where two answers part, None if they are identical."""
    for index, (turn, base) in enumerate(zip_longest(answer.turns, baseline.turns)):
        tokens, base_tokens = turn.token_ids if turn else [], base.token_ids if base else []
        if tokens != base_tokens or not (turn and base):
            parts = (at for at, (ours, its) in enumerate(zip(tokens, base_tokens, strict=False)) if ours != its)
            return index, next(parts, min(len(tokens), len(base_tokens)))
    return None


def phase_seconds(turns: Sequence[Turn]) -> dict[str, float]:
    """Seconds of each of `PHASES` without the prefill steps, then ``prefill`` and ``other``: all the turns' time."""
    steps = decode_steps(turns)
    seconds = {phase: sum(step.seconds[index] for step in steps) for index, phase in enumerate(PHASES)}
    seconds["prefill"] = sum(sum(turn.steps[0].seconds) for turn in turns if turn.steps)
    seconds["other"] = _seconds(turns) - sum(seconds.values())
    return seconds


def noise(repeats: Sequence[Repeat]) -> float | None:
    """What the speed-up of another run may differ by, as a relative standard deviation; None where nothing tells.

    Of the baseline it is that of its tokens per second. With several repeats it is their own spread, each summed over
    all questions (the middle of them is steadier). With one it is the standard error over questions of the time of a
    base forward, against the baseline's: it also holds what questions differ by, and is then too large. Neither sees
    what slows a whole run down evenly.
    """
    is_baseline = repeats[0][0][0].drafter == repeats[0][1][0].drafter
    if len(repeats) > 1:
        found = [
            _ratio(_tokens(turns), _seconds(turns)) if is_baseline else speedup(turns, _turns(base))
            for turns, base in ((_turns(answers), base) for answers, base in repeats)
        ]
        return intervals.spread(found) if all(found) else None
    pairs = [
        (seconds_a_step(answer.turns), 1.0 if is_baseline else seconds_a_step(base.turns))
        for answer, base in _pair(*repeats[0])
    ]
    return intervals.standard_error([own / base for own, base in pairs if own and base])


def middle(repeats: Sequence[Sequence[Answer]]) -> list[Answer]:
    """To each question the answer of median time, of two the faster one, out of repeats in the same order."""
    return [
        sorted(answers, key=lambda answer: answer.seconds)[(len(answers) - 1) // 2]
        for answers in zip(*repeats, strict=True)
    ]


def seconds_a_step(turns: Sequence[Turn]) -> float | None:
    """Mean time of a step, prefill excluded."""
    steps = decode_steps(turns)
    return _ratio(sum(sum(step.seconds) for step in steps), len(steps))


def _summarise_category(pairs: Sequence[tuple[Answer, Answer]]) -> CategorySummary:
    turns, base_turns = _turns(answer for answer, _ in pairs), _turns(base for _, base in pairs)
    return CategorySummary(
        questions=len(pairs),
        acceptance_length=acceptance_length(turns),
        speedup=speedup(turns, base_turns),
        tokens_per_second=_ratio(_tokens(turns), _seconds(turns)),
        identical=sum(first_difference(answer, base) is None for answer, base in pairs) / len(pairs),
    )


def _interval(rows: Sequence[Sequence[float]], powers: Sequence[int]) -> tuple[float, float] | None:
    return intervals.interval(list(zip(*rows, strict=True)), powers) if rows else None


def _pair(answers: Sequence[Answer], baseline: Sequence[Answer]) -> list[tuple[Answer, Answer]]:
    by_id = {base.question_id: base for base in baseline}
    missing = [answer.question_id for answer in answers if answer.question_id not in by_id]
    if missing:
        raise ValueError(f"the baseline has no answer to question {missing[0]}: decode the same questions with both")
    return [(answer, by_id[answer.question_id]) for answer in answers]


def _turns(answers: Iterable[Answer]) -> list[Turn]:
    return [turn for answer in answers for turn in answer.turns]


def _tokens(turns: Iterable[Turn]) -> int:
    return sum(len(turn.token_ids) for turn in turns)


def _seconds(turns: Iterable[Turn]) -> float:
    return sum(turn.seconds for turn in turns)


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
