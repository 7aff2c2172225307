"""Self-speculation: where a draft ends, and how the threshold adapts to the acceptance."""

import random

import pytest

from drafters import DraftTree, Limits, SelfSpeculative, StepResult
from drafters.training_free.draft_model import DraftedTokens

LIMITS = Limits(max_depth=100)


class Counting:
    """An inner session that writes 10, 11, 12, ... and records its arguments."""

    forwards, remembers, samples_drafts = 0, False, False

    def __init__(self):
        self.calls, self.begun = [], []

    def begin(self, prompt):
        self.begun.append(list(prompt))

    def reset(self):
        pass

    def write(self, seq, num_tokens, eos=frozenset(), threshold=0.0, draft_seed=0):
        self.calls.append((list(seq), num_tokens, eos, threshold))
        return DraftedTokens(list(range(10, 10 + num_tokens)), [])


def step(drafted, accepted, bonus=99):
    tokens = list(range(10, 10 + drafted))
    tree = DraftTree(tokens, range(-1, drafted - 1))
    return StepResult(1, tree, None, list(range(accepted)), [*tokens[:accepted], bonus])


def official(steps, threshold, most):
    """The threshold before each step by a literal version of the authors' rule."""
    auto_parameters = [1, 0.5, 0.9, 1e-2, 0.9]
    th_stop_draft, tmp_matchness, before = threshold, 0, []
    for drafted, matched in steps:
        before.append(th_stop_draft)
        tmp_matchness = auto_parameters[1] * tmp_matchness + (1 - auto_parameters[1]) * (matched / drafted)
        if tmp_matchness < auto_parameters[2]:
            new_th_stop_draft = th_stop_draft + auto_parameters[3]
        else:
            new_th_stop_draft = th_stop_draft if drafted == most else th_stop_draft - auto_parameters[3]
        th_stop_draft = auto_parameters[4] * th_stop_draft + (1 - auto_parameters[4]) * new_th_stop_draft
    return before


def thresholds(drafter, steps):
    """Return the thresholds that the drafter passes to its inner session, step by step."""
    for drafted, accepted in steps:
        drafter.propose([1], LIMITS)
        drafter.observe(step(drafted, accepted))
    return [call[-1] for call in drafter.inner.calls]


def random_steps(seed, most, good):
    rng = random.Random(seed)
    drafted = [rng.randint(1, most) for _ in range(60)]
    return [(count, count if rng.random() < good else rng.randint(0, count)) for count in drafted]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("good", [0.2, 0.8, 1.0])
def test_the_threshold_follows_the_authors_rule(seed, good):
    steps = random_steps(seed, 5, good)
    expected = official(steps, 0.6, most=5)
    assert thresholds(SelfSpeculative(Counting(), 5, 0.6), steps) == pytest.approx(expected, abs=1e-12)


def test_a_fixed_threshold_does_not_change():
    assert set(thresholds(SelfSpeculative(Counting(), 5, 0.6, adaptive=False), random_steps(0, 5, 0.5))) == {0.6}


def test_a_text_starts_with_the_first_threshold():
    drafter, steps = SelfSpeculative(Counting(), 5, 0.6), random_steps(0, 5, 0.5)
    drafter.begin([1])
    thresholds(drafter, steps)
    drafter.begin([2])
    again = thresholds(drafter, steps)[len(steps) :]
    assert drafter.inner.begun == [[1], [2]]
    assert again == pytest.approx(official(steps, 0.6, 5), abs=1e-12)
    drafter.reset()
    drafter.begin([3])
    assert thresholds(drafter, steps)[2 * len(steps) :] == pytest.approx(official(steps, 0.6, 5), abs=1e-12)


def test_a_step_without_a_draft_does_not_change_the_threshold():
    drafter = SelfSpeculative(Counting(), 5, 0.6)
    drafter.observe(step(0, 0))
    assert drafter.threshold == 0.6


def test_a_drafted_end_token_counts_as_accepted_although_it_is_not_cached():
    tree = DraftTree([10, 11, 2], [-1, 0, 1])
    ended, whole = SelfSpeculative(Counting(), 3, 0.6), SelfSpeculative(Counting(), 3, 0.6)
    for _ in range(6):
        ended.observe(StepResult(1, tree, None, [0, 1], [10, 11, 2]))
        whole.observe(step(3, 3))
    assert ended.threshold == whole.threshold != official([(3, 2)] * 7, 0.6, 3)[-1]
