"""The automatic budget, ``num_nodes=auto``: a drafter proposes as many draft tokens as pay for their time."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from drafters import Lookahead, Merged, SelfDraft
from drafters.protocol import Drafter, Limits, RequiredOutputs, StepResult
from drafters.tree import DraftTree

SPEED_DECAY = 0.98  # weight of an earlier step relative to the one after it, in averages of the speed
GAIN_DECAY = 0.95  # the same in averages of gains: chance counts more if it is lower, changes less if it is higher
MAX_CREDIT = 12.0  # tokens that may be lost until drafting stops
FIRST_CREDIT = 8.0  # the same before anything was gained
MAX_DEBT = 32.0  # tokens that a single draft may cost at most, as its time may be measured wrongly
TRIAL_CREDIT = 2.5  # tokens that a trial of drafting may lose
TRIAL_DRAFTS = 2  # drafts of a trial at least; the first one after a pause takes longer than usual
ALLOWANCE = 0.015  # tokens per step that drafting may lose in the long run
MIN_ALLOWANCE = 0.004  # the same after several trials that did not pay
# Numbers of nodes that are tried.
SIZES = [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
NUM_KEPT = 64  # durations kept of each size
FIRST_SIZE = 4  # larger drafts are tried when these have been measured, at most twice as large each time
REVIEW = 8  # steps between two estimates of times and acceptance
EXPLORATION = 128  # drafts between those that feed more or less than seems best
NUM_TIMED = 5  # durations of a size with which its time is known
NUM_KNOWN = 16  # durations of a size, or drafts, about which enough is known
DECAY = 0.9  # of what is known about acceptance, in each review
UNSEEN_DECAY = 0.98  # the same for ranks that were not fed
BINS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85]  # borders between bins of path probabilities
TOO_SMALL = 0.1  # share of drafts that may have fewer nodes than would pay, if more of them take longer to draft
SPARE_SECONDS = 0.01  # share of a step's time that drafting nodes may take which are hardly ever fed
PRIOR = 2.0  # accepted nodes that a bin counts as right before any was fed
PAUSE = 8  # steps without a draft after which a drafter has more to read than usual
FED_WHOLE = (Lookahead, SelfDraft)  # drafters that learn from a whole draft only: it is fed whole or not at all


class Budgeted(Drafter):
    """A drafter whose proposals are limited and cut by a `BudgetController`. The text does not change.

    It measures the time that the drafter takes and the time between proposal and outcome, which is the base's.

    Args:
        drafter: The drafter. A `Merged` one also drafts without its learned part where that does not pay.
        controller: Decides how many nodes are proposed; it is kept from text to text.
    """

    def __init__(self, drafter: Drafter, controller: BudgetController | None = None) -> None:
        self.drafter = drafter
        self.controller = controller or BudgetController(isinstance(drafter, FED_WHOLE), isinstance(drafter, Merged))
        self.remembers, self.samples_drafts = drafter.remembers, drafter.samples_drafts
        self._seconds, self._proposed = 0.0, 0.0  # of the last proposal: how long it took, and when it was made

    @property
    def required_outputs(self) -> RequiredOutputs:  # type: ignore[override]
        return self.drafter.required_outputs

    @property
    def draft_forwards(self) -> int:  # type: ignore[override]
        return self.drafter.draft_forwards

    def begin(self, prompt: Sequence[int]) -> None:
        self.drafter.begin(prompt)

    def rewind(self, length: int) -> None:
        self.drafter.rewind(length)

    def reset(self) -> None:
        """Reset the drafter. What was measured stays."""
        self.drafter.reset()

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        started = time.perf_counter()
        limits = replace(limits, max_nodes=self.controller.request(limits.max_nodes))
        if isinstance(self.drafter, Merged):
            self.drafter.learned_rests = self.controller.learned_rests
        tree = self.drafter.propose(seq, limits)
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
    """Average speed of recent steps.

    Args:
        decay: Weight of a step relative to the one after it.
    """

    def __init__(self, decay: float = SPEED_DECAY) -> None:
        self._decay = decay
        self._tokens = self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Add a step."""
        self._tokens = self._decay * self._tokens + tokens
        self._seconds = self._decay * self._seconds + seconds

    def speed(self, vanilla: float) -> float:
        """Tokens per second, together with one step of the base alone that took ``vanilla`` seconds."""
        return (self._tokens + 1) / (self._seconds + vanilla)


class GainTracker:
    """Tells whether a way of drafting pays, by the tokens that it gains or loses against what it replaces.

    When its credit is used up, it rests. Each step then adds a small allowance, and with `TRIAL_CREDIT` it is tried
    again. So a useless drafter costs little more than `ALLOWANCE` tokens a step, apart from `FIRST_CREDIT` once.
    """

    def __init__(self) -> None:
        self.pays = True
        self._credit, self._allowance = FIRST_CREDIT, ALLOWANCE
        self._is_trial, self._trial_drafts = False, 0  # whether it is being tried again, and drafts left of the trial

    def add(self, gain: float = 0.0) -> bool:
        """Add what a step has gained, 0 where it did not take part; return whether a trial starts now."""
        self._credit = min(MAX_CREDIT, max(-MAX_DEBT, self._credit + self._allowance + gain))
        if self.pays and gain:
            self._trial_drafts -= 1
        if self.pays and self._credit < 0 and self._trial_drafts <= 0:
            self.rest()
        elif not self.pays and self._credit >= TRIAL_CREDIT:
            self.start_trial()
            return True
        elif self._credit == MAX_CREDIT:
            self._is_trial, self._allowance = False, ALLOWANCE
        return False

    def start_trial(self) -> None:
        """Try it again."""
        self._credit, self.pays, self._is_trial, self._trial_drafts = TRIAL_CREDIT, True, True, TRIAL_DRAFTS

    def rest(self) -> None:
        """Let it rest, whatever its credit is; after a trial that did not pay the next one comes later."""
        self._credit, self.pays = min(0.0, self._credit), False
        if self._is_trial:
            self._allowance = max(MIN_ALLOWANCE, self._allowance / 2)


class CostCurve:
    """Seconds of a step by its size, learned from noisy durations."""

    def __init__(self) -> None:
        self._durations: dict[int, deque[float]] = {}
        self._estimates: dict[int, float] = {}
        self._changed: set[int] = set()

    def add(self, size: int, seconds: float) -> None:
        """Add the duration of a step."""
        if size > 16:
            size = min(SIZES, key=lambda known: abs(known - size))
        self._durations.setdefault(size, deque(maxlen=NUM_KEPT)).append(seconds)
        self._changed.add(size)

    def charged(self, size: int, seconds: float) -> float:
        """What a duration counts as a cost: at most twice what nine of ten durations of this size stay below."""
        kept = sorted(self._durations.get(size, ()))
        return min(seconds, 2 * kept[len(kept) * 9 // 10]) if len(kept) >= 8 else seconds

    def count(self, size: int) -> int:
        """Number of durations kept of a size."""
        return len(self._durations.get(size, ()))

    def largest(self) -> int:
        """The largest size that was measured at least twice, else 0."""
        return max((size for size, kept in self._durations.items() if len(kept) > 1), default=0)

    def seconds(self) -> list[float]:
        """The seconds of each of `SIZES`.

        Those of a size that was not measured are continued from the smaller ones with their mean slope, or interpolated
        if that is less: a low estimate, too.
        """
        for size in self._changed:
            self._estimates[size] = estimate(self._durations[size])
        self._changed.clear()
        # One duration alone may be an outlier.
        known = sorted(size for size in self._estimates if self.count(size) > 1) or sorted(self._estimates)
        if not known:
            return [0.0] * len(SIZES)
        values = [self._estimates[size] for size in known]
        below = np.searchsorted(known, SIZES, side="right").clip(1) - 1  # the next smaller measured size
        start, lowest = np.array(known)[below], np.array(values)[below]
        slopes = np.maximum(0, lowest - values[0]) / np.maximum(1, start - known[0])
        continued = lowest + slopes * np.maximum(0, np.array(SIZES) - start)
        return np.minimum(continued, np.interp(SIZES, known, values, right=np.inf)).tolist()


def estimate(durations: Collection[float]) -> float:
    """A low estimate of the typical duration, whatever the outliers; with few durations it is lower.

    It is the mean of the middle half, less its standard error, or the shortest of fewer than four. So sizes that are
    hardly known are tried rather than avoided.
    """
    if len(durations) < 4:
        return min(durations)
    cut = len(durations) // 4
    middle = sorted(durations)[cut : len(durations) - cut]
    return sum(middle) / len(middle) - (middle[-1] - middle[0]) / 2 / len(durations) ** 0.5


@dataclass
class Way:
    """What is known about one way of drafting: the times of its drafts, the speed with it, and its recent gains."""

    cost: CostCurve = field(default_factory=CostCurve)
    speed: MovingAverage = field(default_factory=MovingAverage)
    gains: MovingAverage = field(default_factory=lambda: MovingAverage(GAIN_DECAY))


class BudgetController:
    """Decides how many draft tokens each step asks for and feeds, from what earlier steps took and gained.

    Feeding a node pays if the probability that it is accepted exceeds the time that it adds to the step, in tokens at
    the present speed. That probability is the drafter's own, corrected by how often nodes of about this probability
    were accepted; if the drafter gives none, it is how often nodes of this rank were. A large draft takes longer than a
    small one even if it is cut, so a step asks for no more nodes than nearly all of the recent drafts would have fed.

    Whether to draft at all is decided by a `GainTracker` that compares with steps of the base alone. For a drafter that
    can draft without its learned part, a second one decides whether that part takes part.

    For each step, call `request`, which also sets `learned_rests`, then `cut` with the draft, then `observe`. What
    `request` returns and sets depends on earlier steps only.

    Args:
        is_whole: Whether drafts are fed whole or not at all.
        learned_may_rest: Whether the drafter can draft without its learned part.
    """

    def __init__(self, is_whole: bool = False, learned_may_rest: bool = False) -> None:
        self.is_whole, self.learned_may_rest = is_whole, learned_may_rest
        self.learned_rests = False  # in this step
        self._base, self._full, self._light = CostCurve(), Way(), Way()  # drafts with the learned part, and without
        self._base_seconds, self._draft_seconds = self._base.seconds(), self._full.cost.seconds()
        self._num_steps = self._num_drafts = self._since_vanilla = 0
        self._drafting, self._learned = GainTracker(), GainTracker()
        self._num_light = self._since_light = 0  # drafts without the learned part, and those with it since the last one
        self._drafted, self._speed = MovingAverage(), 0.0  # of all steps with a draft; tokens per second
        self._limit = FIRST_SIZE  # the largest number of nodes to try
        self._best_place = SIZES.index(FIRST_SIZE)  # of the size that pays best, for drafters without probabilities
        # Accepted and fed nodes between each two sizes; accepted nodes and the sum of their probabilities in each bin.
        self._accepted_by_rank, self._fed_by_rank = [0.0] * len(SIZES), [0.0] * len(SIZES)
        self._accepted_in_bin, self._expected_in_bin = [0.0] * (len(BINS) + 1), [0.0] * (len(BINS) + 1)
        self._factors = [1.0] * (len(BINS) + 1)
        self._gives_probabilities = False
        self._probabilities: Sequence[float] = ()
        # How many drafts wanted each size lately, and the largest size worth drafting.
        self._wanted, self._worth_drafting = [0.0] * len(SIZES), SIZES[-1]
        self._requested = self._fed = 0
        self._paused = 0  # steps since the learned part drafted

    # ---- decisions

    def request(self, most: int = SIZES[-1]) -> int:
        """Return how many nodes the drafter may propose in this step, at most ``most``; 0 for no draft."""
        self._requested = min(most, self._choose_request())
        if self.learned_may_rest:
            patience = (1, 1, 4, 4, 16, 16)[self._num_light] if self._num_light < 6 else 64
            self.learned_rests = not self._learned.pays or self._since_light >= patience
        return self._requested

    def _choose_request(self) -> int:
        num_vanilla = self._base.count(0)
        is_close = self._speed * self._base_seconds[0] < 1.25
        patience = 4 if num_vanilla < 2 else 16 if num_vanilla < 6 else 64 if is_close else 512
        if not self._drafting.pays or self._since_vanilla >= patience:
            return 0
        if self.is_whole:
            return SIZES[-1]
        if self._gives_probabilities:
            return min(self._limit, self._worth_drafting)
        return SIZES[max(1, self._explored(self._best_place))]

    def _explored(self, place: int) -> int:
        """The place in `SIZES`, or now and then one near it, more often while little is known about that size."""
        last = bisect_left(SIZES, self._limit)
        step = (1, -1, 2)[self._num_drafts % 3]
        other = min(max(place + step, 0), last)
        # With probabilities, only the time of a size is to be found out, and without them its acceptance, too.
        enough = NUM_TIMED if self._gives_probabilities else NUM_KNOWN
        if self._base.count(SIZES[other]) < enough:
            is_turn = self._num_drafts % (EXPLORATION // 4) < 2
        else:
            is_turn = self._num_drafts % EXPLORATION < 2 and step < 2
        return other if is_turn else min(place, last)

    def cut(self, num_nodes: int, probabilities: Sequence[float] = ()) -> int:
        """Return how many nodes of a draft to feed, the first ones.

        Args:
            num_nodes: Number of nodes in the draft.
            probabilities: The drafter's estimate of the probability of each node, most probable first; empty if it
                gives none, or if the draft must not be cut. Then all nodes are fed.
        """
        self._fed, self._probabilities = num_nodes, probabilities
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

    # ---- outcomes

    def observe(self, path: Sequence[int], num_emitted: int, draft_seconds: float, base_seconds: float) -> None:
        """Learn from a step that fed one token before the draft.

        Args:
            path: Accepted nodes.
            num_emitted: Tokens that the text gained.
            draft_seconds: Duration of the drafter's part of the step.
            base_seconds: Duration of the rest of the step.
        """
        way = self._light if self.learned_rests else self._full
        self._num_steps += 1
        self._base.add(self._fed, base_seconds)
        is_new, typical_seconds = self._base.count(self._fed) < 5, 0.0
        self._since_vanilla = self._since_vanilla + 1 if self._fed else 0
        if self._requested:
            if self.learned_rests or self._paused < PAUSE:
                way.cost.add(self._requested, draft_seconds)
                draft_seconds = typical_seconds = way.cost.charged(self._requested, draft_seconds)
            else:  # after a pause a drafter first reads what was written since
                typical_seconds = min(draft_seconds, self._draft_seconds[bisect_left(SIZES, self._requested)])
            is_new |= way.cost.count(self._requested) < 5
            self._learn(path)
        self._paused = 0 if self._requested and not self.learned_rests else self._paused + 1
        was_drafting = self._drafting.pays
        if is_new or (was_drafting and self._num_steps % REVIEW == 0):
            self._review()
        self._track_gains(way, num_emitted, typical_seconds, draft_seconds - typical_seconds)
        if self._drafting.pays and not was_drafting:
            self._review()

    def _learn(self, path: Sequence[int]) -> None:
        """Count which nodes were accepted, by probability or else by rank."""
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

    def _track_gains(self, way: Way, num_emitted: int, draft_seconds: float, reading_seconds: float) -> None:
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
            if self.learned_may_rest and not self.learned_rests:
                more = self._full.speed.speed(vanilla) - self._light.speed.speed(vanilla)
                of_learned = seconds * more - reading_seconds / vanilla
            else:
                gain -= reading_seconds / vanilla
        # What was found before a pause does not count in the trial after it.
        if self._drafting.add(gain):
            self._full.gains, self._light.gains = MovingAverage(GAIN_DECAY), MovingAverage(GAIN_DECAY)
        if self.learned_may_rest:
            if self._learned.add(of_learned):
                self._full.speed, self._full.gains = MovingAverage(), MovingAverage(GAIN_DECAY)
            if self._requested and not (self._drafting.pays or self.learned_rests):
                self._learned.rest()  # drafts without it have a trial of their own
                self._drafting.start_trial()

    def _review(self) -> None:
        """Estimate times and acceptance anew."""
        if not self._base.count(0):
            return
        self._base_seconds, self._draft_seconds = self._base.seconds(), self._full.cost.seconds()
        vanilla = self._base_seconds[0]
        self._speed = max(1 / vanilla, self._drafted.speed(vanilla))
        self._limit = min(max(FIRST_SIZE, 2 * self._base.largest()), SIZES[-1])
        if self._gives_probabilities:
            self._worth_drafting = self._largest_worth_drafting()
            self._wanted = [DECAY * count for count in self._wanted]
            pairs = zip(self._accepted_in_bin, self._expected_in_bin, strict=True)
            self._factors = [(accepted + PRIOR) / (expected + PRIOR) for accepted, expected in pairs]
            for counts in (self._accepted_in_bin, self._expected_in_bin):
                counts[:] = [DECAY * count for count in counts]
        elif not self.is_whole:
            self._best_place = self._best_by_rank()

    def _largest_worth_drafting(self) -> int:
        """The smallest size that only few drafts would have exceeded, or a larger one that takes hardly longer."""
        place, num_drafts, larger = len(SIZES) - 1, sum(self._wanted), 0.0
        if num_drafts < NUM_KNOWN:
            return SIZES[place]
        while SIZES[place] > FIRST_SIZE and (larger := larger + self._wanted[place]) <= TOO_SMALL * num_drafts:
            place -= 1
        if self._full.cost.count(SIZES[place]) < NUM_TIMED:
            return SIZES[place]  # to find out what it takes
        most = self._draft_seconds[place] + SPARE_SECONDS * (self._base_seconds[place] + self._draft_seconds[place])
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
            decay = DECAY if self._fed >= end else UNSEEN_DECAY
            self._accepted_by_rank[place] *= decay
            self._fed_by_rank[place] *= decay
        return best
