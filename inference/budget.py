"""The automatic budget, ``num_nodes=auto``: a drafter proposes as many draft tokens as pay for their time."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from drafters import Lookahead, Merged, SelfDraft
from drafters.protocol import Drafter, Limits, StepResult
from drafters.tree import DraftTree

SLOW, FAST = 0.98, 0.95  # weight of an earlier step or review relative to the one after it, in averages
CREDIT = 8.0  # tokens that may be lost until drafting stops
MAX_DEBT = 32.0  # tokens that a single draft may cost at most, as its time may be measured wrongly
TRIAL_CREDIT = 2.5  # tokens that a trial of drafting may lose
ALLOWANCE = 0.015  # tokens per step that drafting may lose in the long run
MIN_ALLOWANCE = 0.004  # the same after several trials that did not pay
# Numbers of nodes that are tried.
SIZES = [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
NUM_KEPT = 64  # durations kept of each size
FIRST_SIZE = 4  # larger drafts are tried when these have been measured, at most twice as large each time
REVIEW = 8  # steps between two estimates of times and acceptance
EXPLORATION = 128  # drafts between those that feed more or less than seems best
NUM_TIMED, NUM_KNOWN = 5, 16  # durations of a size with which its time is known, and its acceptance
BINS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85]  # borders between bins of path probabilities
PRIOR = 2.0  # accepted nodes that a bin counts as right before any was fed
TOO_SMALL = 0.1  # share of drafts that may have fewer nodes than would pay, if more of them take longer to draft
SPARE_SECONDS = 0.01  # share of the base's time that drafting nodes may take which are hardly ever fed
FED_WHOLE = (Lookahead, SelfDraft)  # drafters that learn from a whole draft only: it is fed whole or not at all


class Budgeted(Drafter):
    """A drafter whose proposals are limited and cut by a `BudgetController`. The text does not change.

    It measures the time that the drafter takes, and that between a proposal and its outcome, which is the base's. A
    `Merged` drafter also drafts without its learned part where that does not pay.
    """

    def __init__(self, drafter: Drafter, controller: BudgetController | None = None) -> None:
        self.drafter = drafter
        self.controller = controller or BudgetController(isinstance(drafter, FED_WHOLE), isinstance(drafter, Merged))
        self.required_outputs, self.draft_forwards = drafter.required_outputs, drafter.draft_forwards
        self.remembers, self.samples_drafts = drafter.remembers, drafter.samples_drafts
        self.begin, self.rewind, self.reset = drafter.begin, drafter.rewind, drafter.reset  # type: ignore[method-assign]

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        started, drafter = time.perf_counter(), self.drafter
        limits = replace(limits, max_nodes=self.controller.request(limits.max_nodes))
        if isinstance(drafter, Merged):
            drafter.learned_rests = self.controller.learned_rests
        tree = drafter.propose(seq, limits)
        self.draft_forwards = drafter.draft_forwards
        tree = tree.pruned(limits.max_depth, limits.max_nodes, limits.eos, limits.max_scratch_depth)
        # To choose among drawn nodes by what was drawn would bias the text; scratch nodes are needed together.
        may_be_cut = not (tree.distributions or tree.num_scratch)
        tree = tree.first(self.controller.cut(len(tree), tree.probabilities if may_be_cut else ()))
        self._proposed = time.perf_counter()
        self._seconds = self._proposed - started
        return tree

    def observe(self, step: StepResult) -> None:
        started = time.perf_counter()
        self.drafter.observe(step)
        if step.num_pending == 1:  # not a prefill
            seconds = self._seconds + time.perf_counter() - started
            self.controller.observe(step.path, len(step.emitted), seconds, started - self._proposed)


class MovingAverage:
    """Average speed of recent steps, with the weight of a step relative to the one after it."""

    def __init__(self, decay: float) -> None:
        self._decay, self._tokens, self._seconds = decay, 0.0, 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self._tokens = self._decay * self._tokens + tokens
        self._seconds = self._decay * self._seconds + seconds

    def speed(self, vanilla: float) -> float:
        """Tokens per second, together with one step of the base alone that took ``vanilla`` seconds."""
        return (self._tokens + 1) / (self._seconds + vanilla)


class GainTracker:
    """Tells whether a way of drafting pays, by the tokens that it gains or loses against what it replaces.

    When its credit is used up, it rests. Each step then adds a small allowance, and with `TRIAL_CREDIT` it is tried
    again. So a useless drafter costs little more than `ALLOWANCE` tokens a step, apart from `CREDIT` once.
    """

    def __init__(self) -> None:
        self.pays, self._is_trial = True, False
        self._credit, self._allowance = CREDIT, ALLOWANCE

    def add(self, gain: float = 0.0) -> None:
        """Add what a step has gained, 0 where it did not take part."""
        self._credit = min(CREDIT, max(-MAX_DEBT, self._credit + self._allowance + gain))
        if self.pays and self._credit < 0:
            self.rest()
        elif not self.pays and self._credit >= TRIAL_CREDIT:
            self.start_trial()
        elif self._credit == CREDIT:
            self._is_trial, self._allowance = False, ALLOWANCE

    def start_trial(self) -> None:
        self._credit, self.pays, self._is_trial = TRIAL_CREDIT, True, True

    def rest(self) -> None:
        """Let it rest, whatever its credit is; after a trial that did not pay the next one comes later."""
        self._credit, self.pays = min(0.0, self._credit), False
        if self._is_trial:
            self._allowance = max(MIN_ALLOWANCE, self._allowance / 2)


class CostCurve:
    """Seconds of a step by its size, learned from noisy durations."""

    def __init__(self) -> None:
        self._durations: dict[int, deque[float]] = {}

    def add(self, size: int, seconds: float) -> None:
        if size > 16:
            size = min(SIZES, key=lambda known: abs(known - size))
        self._durations.setdefault(size, deque(maxlen=NUM_KEPT)).append(seconds)

    def count(self, size: int) -> int:
        return len(self._durations.get(size, ()))

    def known(self) -> list[int]:
        """The sizes that were measured at least twice, as a single duration may be an outlier; else all of them."""
        return sorted(size for size, kept in self._durations.items() if len(kept) > 1) or sorted(self._durations)

    def seconds(self) -> list[float]:
        """The seconds of each of `SIZES`, continued from smaller ones or interpolated, if less, where not measured."""
        if not (known := self.known()):
            return [0.0] * len(SIZES)
        values = [estimate(self._durations[size]) for size in known]
        below = np.searchsorted(known, SIZES, side="right").clip(1) - 1  # the next smaller measured size
        start, lowest = np.array(known)[below], np.array(values)[below]
        slopes = np.maximum(0, lowest - values[0]) / np.maximum(1, start - known[0])
        continued = lowest + slopes * np.maximum(0, np.array(SIZES) - start)
        return np.minimum(continued, np.interp(SIZES, known, values, right=np.inf)).tolist()


def estimate(durations: Collection[float]) -> float:
    """A low estimate of the typical duration, so that sizes are tried: the mean of the middle half less its error."""
    if len(durations) < 4:
        return min(durations)
    cut = len(durations) // 4
    middle = sorted(durations)[cut : len(durations) - cut]
    return sum(middle) / len(middle) - (middle[-1] - middle[0]) / 2 / len(durations) ** 0.5


class Way:
    """What is known about one way of drafting: the times of its drafts, the speed with it, and its recent gains."""

    def __init__(self) -> None:
        self.cost, self.speed, self.gains = CostCurve(), MovingAverage(SLOW), MovingAverage(FAST)


class BudgetController:
    """Decides how many draft tokens each step asks for and feeds, from what earlier steps took and gained.

    Feeding a node pays if the probability that it is accepted exceeds the time that it adds to the step, in tokens at
    the present speed. That probability is the drafter's own, corrected by how often nodes of about this probability
    were accepted; if the drafter gives none, it is how often nodes of this rank were. Whether to draft at all is
    decided by a `GainTracker` that compares with steps of the base alone. For each step, call `request`, which depends
    on earlier steps only, then `cut` with the draft, then `observe`.

    Some drafts are fed whole or not at all. If the drafter can draft without its learned part, a second `GainTracker`
    decides whether that part drafts, and `request` sets ``learned_rests``.
    """

    def __init__(self, is_whole: bool = False, learned_may_rest: bool = False) -> None:
        self.is_whole, self.learned_may_rest = is_whole, learned_may_rest
        self.learned_rests = False
        self._base, self._full, self._light = CostCurve(), Way(), Way()  # drafts with the learned part, and without
        self._base_seconds, self._draft_seconds = self._base.seconds(), self._full.cost.seconds()
        self._num_steps = self._num_drafts = self._since_vanilla = 0
        self._drafting, self._learned = GainTracker(), GainTracker()
        self._num_light = self._since_light = 0  # drafts without the learned part, and those with it since the last one
        self._drafted, self._speed = MovingAverage(SLOW), 0.0  # of all steps with a draft; tokens per second
        self._limit = FIRST_SIZE  # the largest number of nodes to try
        self._best_place = SIZES.index(FIRST_SIZE)  # of the size that pays best, for drafters without probabilities
        # Accepted and fed nodes between each two sizes; accepted nodes and the sum of their probabilities in each bin.
        self._accepted_by_rank, self._fed_by_rank = [0.0] * len(SIZES), [0.0] * len(SIZES)
        self._accepted_in_bin, self._expected_in_bin = [0.0] * (len(BINS) + 1), [0.0] * (len(BINS) + 1)
        self._factors = [1.0] * (len(BINS) + 1)
        self._gives_probabilities, self._probabilities = False, tuple[float, ...]()
        # How many drafts wanted each size lately, and the largest size worth drafting.
        self._wanted, self._worth_drafting = [0.0] * len(SIZES), SIZES[-1]
        self._requested = self._fed = 0

    def request(self, most: int = SIZES[-1]) -> int:
        """Return how many nodes the drafter may propose in this step, at most ``most``; 0 for no draft."""
        if self.learned_may_rest:
            self.learned_rests = not self._learned.pays or self._since_light >= min(64, 4 ** (self._num_light // 2))
        num_vanilla, is_close = self._base.count(0), self._speed * self._base_seconds[0] < 1.25
        patience = 4 if num_vanilla < 2 else 16 if num_vanilla < 6 else 64 if is_close else 512
        if not self._drafting.pays or self._since_vanilla >= patience:
            wanted = 0
        elif self.is_whole:
            wanted = SIZES[-1]
        elif self._gives_probabilities:
            wanted = min(self._limit, self._worth_drafting)
        else:
            wanted = SIZES[max(1, self._explored(self._best_place))]
        self._requested = min(most, wanted)
        return self._requested

    def _explored(self, place: int) -> int:
        """The place in `SIZES`, or now and then one near it, more often while little is known about that size."""
        last = bisect_left(SIZES, self._limit)
        other = min(max(place + (1, -1, 2)[self._num_drafts % 3], 0), last)
        # With probabilities, only the time of a size is to be found out, and without them its acceptance, too.
        is_known = self._base.count(SIZES[other]) >= (NUM_TIMED if self._gives_probabilities else NUM_KNOWN)
        is_turn = self._num_drafts % (EXPLORATION if is_known else EXPLORATION // 4) < 2
        return other if is_turn else min(place, last)

    def cut(self, num_nodes: int, probabilities: Sequence[float] = ()) -> int:
        """Return how many nodes of a draft to feed, the first ones; all if there are no falling probabilities."""
        self._fed, self._probabilities = num_nodes, tuple(probabilities)
        if not probabilities:
            return num_nodes
        self._gives_probabilities = True
        most = min(num_nodes, self._limit)
        expected, best, place = 0.0, 0, 0
        best_worth = -self._speed * self._base_seconds[0]
        for node, probability in enumerate(probabilities[:most], 1):
            expected += min(1.0, probability * self._factors[bisect_left(BINS, probability)])
            if node == SIZES[place + 1] or node == most:
                place += 1
                worth = expected - self._speed * self._base_seconds[place]
                if worth > best_worth:
                    best, best_worth = place, worth
        is_whole = SIZES[best] >= self._requested  # of a larger draft more might have been fed
        self._wanted[min(best + is_whole, len(SIZES) - 1)] += 1
        self._fed = min(SIZES[self._explored(best)], most)
        return self._fed

    def observe(self, path: Sequence[int], num_emitted: int, draft_seconds: float, base_seconds: float) -> None:
        """Learn from the accepted nodes, the emitted tokens and the times of drafter and base in a step."""
        way = self._light if self.learned_rests else self._full
        self._num_steps += 1
        self._base.add(self._fed, base_seconds)
        self._since_vanilla = self._since_vanilla + 1 if self._fed else 0
        if self._requested:
            way.cost.add(self._requested, draft_seconds)
            if self._probabilities:
                for probability in self._probabilities[: self._fed]:
                    self._expected_in_bin[bisect_left(BINS, probability)] += probability
                for node in path:
                    self._accepted_in_bin[bisect_left(BINS, self._probabilities[node])] += 1
            else:
                for place in range(1, bisect_left(SIZES, self._fed) + 1):
                    self._fed_by_rank[place] += min(SIZES[place], self._fed) - SIZES[place - 1]
                for node in path:
                    self._accepted_by_rank[bisect_left(SIZES, node + 1)] += 1
        if self._base.count(0) and (self._base.count(self._fed) < 5 or self._num_steps % REVIEW == 0):
            self._review()
        gain = of_learned = 0.0
        if self._requested:
            self._num_drafts += 1
            if self._num_drafts == 1 or not self._base.count(0):  # the first one of a process compiles, allocates
                return
            self._num_light += self.learned_rests
            self._since_light = 0 if self.learned_rests else self._since_light + 1
            vanilla = self._base_seconds[0]
            seconds = self._base_seconds[bisect_left(SIZES, self._fed)] + draft_seconds
            for average in (self._drafted, way.speed, way.gains):
                average.add(num_emitted, seconds)
            gain = seconds * (way.gains.speed(vanilla) - 1 / vanilla)  # of recent drafts: one alone depends on chance
            if way is self._full:
                of_learned = seconds * (way.speed.speed(vanilla) - self._light.speed.speed(vanilla))
        self._drafting.add(gain)
        if self.learned_may_rest:
            self._learned.add(of_learned)
            if self._requested and not (self._drafting.pays or self.learned_rests):
                self._learned.rest()  # drafts without it have a trial of their own
                self._drafting.start_trial()

    def _review(self) -> None:
        """Estimate times and acceptance anew."""
        self._base_seconds, self._draft_seconds = self._base.seconds(), self._full.cost.seconds()
        vanilla = self._base_seconds[0]
        self._speed = max(1 / vanilla, self._drafted.speed(vanilla))
        self._limit = min(max(FIRST_SIZE, 2 * self._base.known()[-1]), SIZES[-1])
        if self._gives_probabilities:
            self._worth_drafting = self._largest_worth_drafting()
            self._wanted = [FAST * count for count in self._wanted]
            pairs = list(zip(self._accepted_in_bin, self._expected_in_bin, strict=True))
            self._factors = [(accepted + PRIOR) / (expected + PRIOR) for accepted, expected in pairs]
            self._accepted_in_bin, self._expected_in_bin = (
                [FAST * n for n in counts] for counts in zip(*pairs, strict=True)
            )
        elif not self.is_whole:
            self._best_place = self._best_by_rank()

    def _largest_worth_drafting(self) -> int:
        """The smallest size that only few drafts would have exceeded, or a larger one that takes hardly longer."""
        place, num_drafts, larger = len(SIZES) - 1, sum(self._wanted), 0.0
        while SIZES[place] > FIRST_SIZE and (larger := larger + self._wanted[place]) <= TOO_SMALL * num_drafts:
            place -= 1
        most = self._draft_seconds[place] + SPARE_SECONDS * self._base_seconds[place]
        return max(size for size, seconds in zip(SIZES, self._draft_seconds, strict=True) if seconds <= most)

    def _best_by_rank(self) -> int:
        """The place in `SIZES` of the number of nodes that pays best, for a drafter without probabilities."""
        best, best_worth, expected, chance = 1, float("-inf"), 0.0, 0.8
        for place, (start, end) in enumerate(pairwise(SIZES), 1):
            if start >= self._limit:
                break
            # Unless it was measured, acceptance is taken to fall with the rank.
            chance *= (start + 1) / end
            chance = min(1.0, (self._accepted_by_rank[place] + chance) / (self._fed_by_rank[place] + 1))
            expected += chance * (end - start)
            worth = expected - self._speed * (self._base_seconds[place] + self._draft_seconds[place])
            if worth > best_worth:
                best, best_worth = place, worth
            self._accepted_by_rank[place] *= SLOW
            self._fed_by_rank[place] *= SLOW
        return best
