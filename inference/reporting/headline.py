"""An evaluation in one sentence, and the speeds of its drafters by which it names the fastest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from inference.results.metrics import Summary
from inference.results.served_figures import ServedFigures

Summaries = Mapping[str, Mapping[str, Summary]]  # by benchmark and drafter


@dataclass(frozen=True)
class Speed:
    """The geometric mean of a drafter's speed-ups over benchmarks, and its 95 % interval if it is known."""

    value: float
    interval: tuple[float, float] | None

    def __str__(self) -> str:
        bounds = "" if self.interval is None else " ({:.2f} to {:.2f})".format(*self.interval)
        return f"{self.value:.2f}x{bounds}"


def headline(summaries: Summaries) -> str:
    """The evaluation in one sentence, about the fastest of the drafters that answered the most benchmarks.

    It names one drafter only if the interval of its speed-up is apart from those of the others.
    """
    if any(summary.served for by_drafter in summaries.values() for summary in by_drafter.values()):
        return _served_headline(summaries)
    speeds = measured_speeds(summaries)
    if not speeds:
        only = next(iter(next(iter(summaries.values())).values()))
        speed = "–" if only.tokens_per_second is None else f"{only.tokens_per_second:.1f}"
        return f"Only {only.drafter} was run: {speed} tokens per second."
    best, *others = speeds
    rivals = [best, *(name for name in others if not is_apart(speeds[best], speeds[name]))]
    own = {name: [by_drafter[name] for by_drafter in summaries.values() if name in by_drafter] for name in rivals}
    every = [summary for name in rivals for summary in own[name]]
    identical, answers = sum(s.identical for s in every), sum(s.questions for s in every)
    what = "the same text as" if identical == answers else f"in {identical} of {answers} answers the same text as"
    what = f"{what} {name_of(every[0].baseline)}"
    lengths = [f"{_geometric_mean([s.acceptance_length for s in own[name]]):.1f}" for name in rivals]
    questions = sum(s.questions for s in own[best])
    over = f"over {questions} question{'' if questions == 1 else 's'}"
    over += f" of {len(own[best])} benchmarks (geometric means)" if len(own[best]) > 1 else ""
    over += "" if speed_fields(every)[0] == "speedup" else ", by wall time"
    if len(rivals) == 1:
        times = speeds[best].value
        speed = f"{times:.1f}x faster" if times >= 1 else f"at {times:.2f}x its speed"
        return f"{best} writes {what}, {speed}, {lengths[0]} tokens per base forward, {over}."
    return (
        f"{_listed(rivals)} are not apart: they write {what}, at {_listed([str(speeds[name]) for name in rivals])} its "
        f"speed, {_listed(lengths)} tokens per base forward, {over}."
    )


def _served_headline(summaries: Summaries) -> str:
    """An evaluation in a server in one sentence: the fastest drafter, by each number of requests at once."""
    every = [(s, s.served) for by_drafter in summaries.values() for s in by_drafter.values() if s.served]
    engine = every[0][1].engine
    own: dict[str, list[tuple[Summary, ServedFigures]]] = {}
    for summary, served in every:
        if not summary.is_baseline:
            own.setdefault(served.drafter, []).append((summary, served))
    best = max(own, key=lambda name: _geometric_mean([s.wall_speedup for s, _ in own[name]]), default=None)
    levels = sorted({served.concurrency for _, served in (every if best is None else own[best])})
    at_once = f"{_listed([str(level) for level in levels])} request{'' if levels == [1] else 's'} at once"
    if best is None:
        speeds = [_geometric_mean([s.tokens_per_second for s, at in every if at.concurrency == n]) for n in levels]
        written = _listed([f"{speed:.1f}" for speed in speeds])
        return f"Only {every[0][1].drafter} was run in {engine}: {written} tokens per second with {at_once}."
    times = [_geometric_mean([s.wall_speedup for s, at in own[best] if at.concurrency == level]) for level in levels]
    identical, answers = sum(s.identical for s, _ in own[best]), sum(s.questions for s, _ in own[best])
    what = "the same text as" if identical == answers else f"in {identical} of {answers} answers the same text as"
    lengths = [s.acceptance_length for s, _ in own[best]]
    accepted = f", {_geometric_mean(lengths):.1f} tokens per base forward" if all(lengths) else ""
    return (
        f"In {engine}, {best} writes {what} {name_of(own[best][0][0].baseline)}, at "
        f"{_listed([f'{each:.2f}x' for each in times])} its tokens per second with {at_once}{accepted}."
    )


def measured_speeds(summaries: Summaries) -> dict[str, Speed]:
    """The speeds of the drafters that answered the most benchmarks, the fastest drafter first."""
    by_name: dict[str, list[Summary]] = {}
    for by_drafter in summaries.values():
        for drafter, summary in by_drafter.items():
            if not summary.is_baseline:
                by_name.setdefault(drafter, []).append(summary)
    num_benchmarks = max(map(len, by_name.values()), default=0)
    own = {drafter: each for drafter, each in by_name.items() if len(each) == num_benchmarks}
    speedup, interval = speed_fields([summary for each in own.values() for summary in each])
    speeds = {
        drafter: _mean_speed([getattr(s, speedup) for s in each], [getattr(s, interval) for s in each])
        for drafter, each in own.items()
    }
    return dict(sorted(speeds.items(), key=lambda item: -item[1].value))


def speed_fields(summaries: Iterable[Summary]) -> tuple[str, str]:
    """The names of the fields with speed-up and interval: of step times or, if these are older results, wall times."""
    has_speedups = any(summary.speedup is not None for summary in summaries)
    return ("speedup", "speedup_interval") if has_speedups else ("wall_speedup", "wall_speedup_interval")


def is_apart(faster: Speed, slower: Speed) -> bool:
    """Whether the intervals of two speeds are known and do not overlap."""
    return faster.interval is not None and slower.interval is not None and faster.interval[0] > slower.interval[1]


def fastest(summaries: Summaries) -> str | None:
    """The fastest of the drafters that answered the most benchmarks, by the geometric mean of its speed-ups."""
    return next(iter(measured_speeds(summaries)), None)


def _mean_speed(values: Sequence[float | None], intervals: Sequence[tuple[float, float] | None]) -> Speed:
    mean = _geometric_mean(values)
    known = [(value, *bounds) for value, bounds in zip(values, intervals, strict=True) if value and bounds]
    if len(known) < len(values):
        return Speed(mean, None)
    below = math.hypot(*(math.log(value / low) for value, low, _ in known)) / len(known)
    above = math.hypot(*(math.log(high / value) for value, _, high in known)) / len(known)
    return Speed(mean, (mean * math.exp(-below), mean * math.exp(above)))


def _listed(names: Sequence[str]) -> str:
    """Names in a sentence: "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def name_of(baseline: str) -> str:
    """How sentences name a baseline."""
    name = baseline.partition(" @ ")[0]  # without the number of requests at once
    return "the base" if name == "none" else name


def _geometric_mean(values: Sequence[float | None]) -> float:
    measured = [value for value in values if value]
    return math.exp(sum(map(math.log, measured)) / len(measured)) if measured else 0.0
