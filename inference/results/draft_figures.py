"""What becomes of draft tokens: acceptance rates by position, efficiency, waste, and how other tools count them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from inference.results import intervals
from inference.verifier.session import StepCost

Interval = tuple[float, float]


@dataclass(frozen=True)
class PositionRate:
    """How often draft tokens of one position are accepted; position 1 is the first after the root.

    Intervals are 95 % confidence intervals of `intervals.interval`, obtained by resampling the questions.

    Args:
        rate: Share of all steps that accept a draft token at the position (unconditional).
        interval: Interval of the rate.
        conditional_rate: Share of the steps that accepted the position before, or of all steps for position 1.
        conditional_interval: Interval of the conditional rate.
    """

    rate: float
    interval: Interval | None
    conditional_rate: float
    conditional_interval: Interval | None


@dataclass(frozen=True)
class GroupAcceptance:
    """What the steps of one group emit, such as those in reasoning; prefills are excluded.

    Args:
        steps: Number of steps.
        acceptance_length: Tokens that they emitted / steps; None if there are no steps.
        acceptance_interval: Its 95 % interval, obtained by resampling the questions.
    """

    steps: int
    acceptance_length: float | None
    acceptance_interval: Interval | None


@dataclass(frozen=True)
class DraftCounts:
    """Sums over the steps of some turns, from which every convention computes its figures; see docs/figures.md.

    Args:
        prefills: Number of prefills, one for each turn.
        prefill_tokens: Tokens that the prefills emitted.
        steps: Number of other steps.
        drafting_steps: Number of them that fed draft tokens that could be accepted.
        emitted: Tokens that these steps emitted, bonus tokens included.
        accepted: Draft tokens that they accepted.
        drafted: Draft tokens that they fed and could have accepted.
        fed: All tokens that they fed to the base.
    """

    prefills: int
    prefill_tokens: int
    steps: int
    drafting_steps: int
    emitted: int
    accepted: int
    drafted: int
    fed: int

    @property
    def acceptance_length(self) -> float | None:
        """Ours, and Spec-Bench's mean accepted tokens: emitted tokens / steps, prefills excluded."""
        return _ratio(self.emitted, self.steps)

    @property
    def block_efficiency(self) -> float | None:
        """The same with the prefills and their tokens (Ouroboros, Self-Draft)."""
        return _ratio(self.emitted + self.prefill_tokens, self.steps + self.prefills)

    @property
    def sglang_accept_length(self) -> float | None:
        """SGLang's accept length: all tokens / verification steps. The prefills count as tokens, not as steps."""
        return _ratio(self.emitted + self.prefill_tokens, self.steps)

    @property
    def vllm_acceptance_length(self) -> float | None:
        """vLLM's mean acceptance length: 1 + accepted tokens / drafts. Steps without drafts do not count."""
        accepted = _ratio(self.accepted, self.drafting_steps)
        return None if accepted is None else 1 + accepted

    @property
    def draft_efficiency(self) -> float | None:
        """Accepted / drafted tokens: vLLM's draft acceptance rate, ANPD's alpha. A tree wastes most of its nodes."""
        return _ratio(self.accepted, self.drafted)

    @property
    def wasted_per_token(self) -> float | None:
        """Tokens fed in vain for each emitted token: fed, but neither a root nor accepted."""
        return _ratio(self.fed - self.steps - self.accepted, self.emitted)

    @property
    def fed_per_token(self) -> float | None:
        """Tokens fed to the base for each emitted token, a proxy of arithmetic and energy; 1 without a drafter."""
        return _ratio(self.fed, self.emitted)

    def by_convention(self) -> dict[str, float]:
        """The acceptance length as each tool counts it, by the tool's name for it; without those that are unknown."""
        figures = {
            "acceptance length (drafters, Spec-Bench)": self.acceptance_length,
            "block efficiency (Ouroboros)": self.block_efficiency,
            "accept length (SGLang)": self.sglang_accept_length,
            "mean acceptance length (vLLM)": self.vllm_acceptance_length,
        }
        return {name: value for name, value in figures.items() if value is not None}


@dataclass(frozen=True)
class DraftFigures:
    """What became of a drafter's draft tokens, prefills excluded unless a convention counts them.

    Args:
        rates: The acceptance rate of each draft position, up to the last that was ever accepted.
        fed_per_token: Tokens fed to the base for each emitted token.
        wasted_per_token: Tokens among them that are neither a root nor accepted.
        conventions: The acceptance length as other tools count it.
    """

    rates: list[PositionRate]
    fed_per_token: float | None
    wasted_per_token: float | None
    conventions: dict[str, float]


def draft_figures(questions: Sequence[Sequence[Sequence[StepCost]]]) -> DraftFigures:
    """Compute the figures from the steps of each turn of each question, the first step of a turn being the prefill."""
    counts = count_drafts([turn for turns in questions for turn in turns])
    rates = acceptance_rates([[step for turn in turns for step in turn[1:]] for turns in questions])
    return DraftFigures(rates, counts.fed_per_token, counts.wasted_per_token, counts.by_convention())


def count_drafts(turns: Sequence[Sequence[StepCost]]) -> DraftCounts:
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


def acceptance_rates(questions: Sequence[Sequence[StepCost]]) -> list[PositionRate]:
    """The acceptance rate of each draft position, up to the last that was ever accepted.

    Args:
        questions: The steps of each question, prefills excluded.
    """
    deepest = max((step.accepted for steps in questions for step in steps), default=0)
    reached = [[len(steps) for steps in questions]]
    reached += [[sum(step.accepted >= d for step in steps) for steps in questions] for d in range(1, deepest + 1)]
    rates = []
    for position in range(1, deepest + 1):
        every, before, own = reached[0], reached[position - 1], reached[position]
        share, given = sum(own) / sum(every), sum(own) / sum(before)
        unconditional, conditional = (intervals.interval([own, of], (1, -1)) for of in (every, before))
        rates.append(PositionRate(share, unconditional, given, conditional))
    return rates


def acceptance_by_depth(steps: Sequence[StepCost]) -> list[float]:
    """Share of the steps that accept at least d draft tokens, for d = 1, 2, ... up to the most accepted."""
    deepest = max((step.accepted for step in steps), default=0)
    return [sum(step.accepted >= depth for step in steps) / len(steps) for depth in range(1, deepest + 1)]


def acceptance_length_of_rates(rates: Sequence[float]) -> float:
    """The acceptance length of steps with these unconditional rates by position: 1 + their sum.

    >>> acceptance_length_of_rates([0.75, 0.5])
    2.25
    """
    return 1 + sum(rates)


def unconditional_rates(conditional: Sequence[float]) -> list[float]:
    """The unconditional rates by position of conditional ones: their running product.

    >>> unconditional_rates([0.75, 0.5])
    [0.75, 0.375]
    """
    rates, product = [], 1.0
    for rate in conditional:
        product *= rate
        rates.append(product)
    return rates


def expected_acceptance_length(rate: float, num_draft: int) -> float:
    """The acceptance length of chains whose tokens are each accepted with one probability (Leviathan et al., eq. 1).

    >>> expected_acceptance_length(0.5, 2)
    1.75
    """
    return acceptance_length_of_rates(unconditional_rates([rate] * num_draft))


def group_acceptance(counts: Iterable[tuple[int, int]]) -> GroupAcceptance:
    """The figures of a group of steps, of which each question emitted so many tokens in so many steps."""
    known = [each for each in counts if each[1]]
    if not known:
        return GroupAcceptance(0, None, None)
    emitted, steps = zip(*known, strict=True)
    return GroupAcceptance(sum(steps), sum(emitted) / sum(steps), intervals.interval([emitted, steps], (1, -1)))


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
