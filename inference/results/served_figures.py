"""Figures of answers that came from a server: its drafts as it counted them, and the latency of its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from inference.results.draft_figures import DraftCounts, DraftFigures, PositionRate
from inference.results.records import Turn


@dataclass(frozen=True)
class SpeculationCounts:
    """What a server counted of its drafts while it wrote some texts.

    Args:
        drafted: Draft tokens that were fed.
        accepted: Draft tokens that were accepted, those behind the end of a text included.
        drafts: Steps that fed draft tokens; None if the server does not count them.
        forwards: Forwards of the base, prefills included, each text counted on its own; None if it does not count them.
        by_position: How often a draft token of each position was accepted; empty if it does not count this.
    """

    drafted: int
    accepted: int
    drafts: int | None = None
    forwards: int | None = None
    by_position: list[int] = field(default_factory=list)

    def __sub__(self, before: SpeculationCounts) -> SpeculationCounts:
        return SpeculationCounts(
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            None if self.drafts is None or before.drafts is None else self.drafts - before.drafts,
            None if self.forwards is None or before.forwards is None else self.forwards - before.forwards,
            [after - own for after, own in zip_longest(self.by_position, before.by_position, fillvalue=0)],
        )

    def are_possible(self, num_texts: int) -> bool:
        """Whether so many texts can have these counts; not if the server was restarted meanwhile, for example."""
        own = [self.drafted, self.accepted, self.drafts or 0, *self.by_position]
        fits = self.drafts is None or max(self.by_position, default=0) <= self.drafts
        fits = fits and (self.forwards is None or self.forwards >= num_texts)
        return fits and min(own) >= 0 and self.accepted <= self.drafted


@dataclass(frozen=True)
class ServedFigures:
    """What only a server has: many requests at once, and the latency that their clients see.

    Percentiles interpolate linearly between the measured values.

    Args:
        engine: What decoded, and its version.
        drafter: Name of the drafter, without the number of requests.
        concurrency: Number of requests at once.
        tokens_per_cpu_second: Tokens / CPU seconds of all processes of the server; None if it runs elsewhere.
        cpu_speedup: This figure / that of the baseline with as many requests at once.
        first_token: Median and 95th percentile of the seconds from a request to the first token of its answer.
        inter_token: The same of the seconds between two tokens of an answer, see `inter_token_seconds`; None if the
            server does not say which tokens an event holds.
    """

    engine: str
    drafter: str
    concurrency: int
    tokens_per_cpu_second: float | None
    cpu_speedup: float | None
    first_token: tuple[float, float] | None
    inter_token: tuple[float, float] | None


def served_name(drafter: str, concurrency: int) -> str:
    """The name of a drafter in results that measure it with several numbers of requests at once."""
    return f"{drafter} @ {concurrency}"


def count_drafts(counts: SpeculationCounts, num_texts: int, num_tokens: int) -> DraftCounts:
    """Turn a server's counters into the counts from which every convention computes its figures.

    vLLM does not count the steps without drafts. A step emits one token more than it accepts, so there are at least
    ``emitted - accepted`` steps; a few less than there were, where drafts were accepted behind the end of a text.

    Args:
        counts: The counters.
        num_texts: Number of texts, each with one prefill that emits one token.
        num_tokens: Number of tokens of these texts.
    """
    emitted = num_tokens - num_texts
    if counts.forwards is None:
        steps = max(counts.drafts or 0, emitted - counts.accepted)
    else:
        steps = counts.forwards - num_texts
    return DraftCounts(
        prefills=num_texts,
        prefill_tokens=num_texts,
        steps=steps,
        drafting_steps=counts.drafts or 0,
        emitted=emitted,
        accepted=counts.accepted,
        drafted=counts.drafted,
        fed=steps + counts.drafted,
    )


def draft_figures(counts: SpeculationCounts, drafts: DraftCounts) -> DraftFigures:
    """The figures of a server's drafts; acceptance rates by position have no intervals, as no question has its own."""
    rates, before = [], drafts.steps
    for accepted in counts.by_position:
        if not accepted:
            break
        rates.append(PositionRate(accepted / drafts.steps, None, accepted / before, None))
        before = accepted
    return DraftFigures(rates, drafts.fed_per_token, drafts.wasted_per_token, drafts.by_convention())


def first_token_seconds(turns: Iterable[Turn]) -> list[float]:
    """Seconds from each request to the first token of its answer."""
    return [turn.arrivals[0][0] for turn in turns if turn.arrivals]


def inter_token_seconds(turns: Iterable[Turn]) -> list[float]:
    """Seconds between two tokens, for each token but those that came first.

    Tokens that arrive together divide the time since the event before equally.

    >>> turn = Turn("", [5, 6, 7], 1, [], 0.5, arrivals=[(0.25, 1), (0.5, 2)])
    >>> inter_token_seconds([turn])
    [0.125, 0.125]
    """
    gaps = []
    for turn in turns:
        for (before, _), (now, count) in zip(turn.arrivals, turn.arrivals[1:], strict=False):
            gaps += [(now - before) / count] * count if count else []
    return gaps


def percentiles(values: Sequence[float]) -> tuple[float, float] | None:
    """The median and the 95th percentile; None without values."""
    if not values:
        return None
    median, high = np.quantile(values, [0.5, 0.95])
    return float(median), float(high)
