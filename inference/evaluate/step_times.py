"""How long answers take without other work on the machine: sums of median step times, by the tokens a step feeds."""

from collections.abc import Iterable, Sequence
from math import log
from statistics import median
from typing import Any

from inference.evaluate.answers import Answer, Turn, decode_steps, turns_of
from inference.evaluate.intervals import half_width
from inference.verifier.session import Step

MIN_STEPS = 8  # fewer steps have no median of their own

Rounds = Sequence[Sequence[Answer]]  # the answers of each repeat, in the same order


def step_times(turn: Turn) -> list[tuple[Step, float]]:
    """Each step with the time it would have taken if it had had a core throughout."""
    walls = [sum(step.seconds) for step in turn.steps]
    times = map(min, walls, turn.cpu_seconds) if turn.cpu_seconds else walls
    return list(zip(turn.steps, times, strict=True))


class MedianStepTimes:
    """Times of one drafter's answers by medians, in which single steps that were slowed down do not show.

    The time of a step is its wall time, or the CPU time of the decoding thread if that is smaller: the rest, it waited
    for a core. A step is then counted as the median of the drafter's steps that feed as many tokens and run the draft
    module as often, multiplied by a factor for its question, as long contexts make steps slower: the median over the
    question's steps of their time relative to those medians. Prefills count as the median of prefills of about the same
    length, and what a turn needs besides its steps as its median over the turns. They are taken over all repeats.
    """

    def __init__(self, rounds: Rounds) -> None:
        answers = [answer for repeat in rounds for answer in repeat]
        turns = turns_of(answers)
        self._costs = median_costs((_kind(step), seconds) for turn in turns for step, seconds in step_times(turn)[1:])
        prefills = [step_times(turn)[0] for turn in turns if turn.steps]
        self._prefills = median_costs((step.fed_pending, seconds) for step, seconds in prefills)
        self._rest = median(map(_rest, turns)) if turns else 0.0
        self.by_question: dict[int, list[Answer]] = {}  # the answers of all repeats
        for answer in answers:
            self.by_question.setdefault(answer.question_id, []).append(answer)
        self._factors = {number: self.factor(repeats) or 1.0 for number, repeats in self.by_question.items()}

    def factor(self, answers: Iterable[Answer]) -> float | None:
        """Median over the steps of the answers of their time relative to steps of their kind; None for few steps."""
        times = [timed for turn in turns_of(answers) for timed in step_times(turn)[1:]]
        ratios = [seconds / cost for step, seconds in times if (cost := self._costs[_kind(step)])]
        return median(ratios) if len(ratios) >= MIN_STEPS else None

    def seconds(self, answer: Answer) -> float:
        """Seconds of an answer by median step times, prefills included."""
        steps = sum(self._costs[_kind(step)] for step in decode_steps(answer.turns))
        prefills = sum(self._prefills[step.fed_pending] for turn in answer.turns for step in turn.steps[:1])
        return self._factors[answer.question_id] * steps + prefills + len(answer.turns) * self._rest


def timing_error(times: MedianStepTimes, baseline: MedianStepTimes) -> float | None:
    """Relative half-width of the 95 % interval of the speed-up on these very questions: what the clock leaves open.

    Each round, which is one answer next to the baseline's, measures how long a step of the drafter takes relative to
    one of the baseline. With several repeats their spread within a question counts; with one repeat the spread over the
    questions, which is an upper estimate because questions also differ in themselves. None if there are too few rounds.
    """
    groups = []
    for question, answers in times.by_question.items():
        pairs = zip(answers, baseline.by_question[question], strict=False)
        factors = [(times.factor([answer]), baseline.factor([base])) for answer, base in pairs]
        groups.append([log(factor / base) for factor, base in factors if factor and base])
    return half_width(groups)


def median_costs(times: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    """Median time of each kind of step; neighbouring kinds share one until it is that of `MIN_STEPS` steps."""
    by_kind: dict[Any, list[float]] = {}
    for kind, seconds in times:
        by_kind.setdefault(kind, []).append(seconds)
    bins: list[list[Any]] = []
    count = MIN_STEPS
    for kind in sorted(by_kind):
        if count >= MIN_STEPS:
            bins.append([])
            count = 0
        bins[-1].append(kind)
        count += len(by_kind[kind])
    if len(bins) > 1 and count < MIN_STEPS:
        last = bins.pop()
        bins[-1] += last
    costs: dict[Any, float] = {}
    for kinds in bins:
        cost = median([seconds for kind in kinds for seconds in by_kind[kind]])
        costs |= dict.fromkeys(kinds, cost)
    return costs


def _kind(step: Step) -> tuple[int, int]:
    return step.fed, step.draft_forwards


def _rest(turn: Turn) -> float:
    """Seconds of a turn outside its steps, without those in which the thread waited for a core."""
    wall = turn.seconds - sum(sum(step.seconds) for step in turn.steps)
    if not turn.cpu_seconds:
        return wall
    return min(wall, sum(turn.cpu_seconds) - sum(seconds for _, seconds in step_times(turn)))
