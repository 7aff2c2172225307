"""What is measured of a step, and what is written of it; nothing here looks at how long one takes."""

import pytest
import torch

from drafters import DraftTree, RequiredOutputs
from inference.engine.runner import Runner
from inference.tuning import step_cost


@pytest.mark.parametrize("most, expected", [(1, [0, 1]), (2, [0, 1, 2]), (3, [0, 1, 2, 3]), (16, [0, 1, 2, 4, 8, 16])])
def test_sizes_are_powers_of_two_and_the_largest(most, expected):
    assert step_cost.sizes(most) == expected


def test_every_size_is_measured_and_the_cache_is_left_as_it_was(make_base):
    runner = Runner(make_base(dtype=torch.float32))
    seconds = step_cost.measure(runner, [0, 1, 5], context=20, repeats=3)
    assert len(seconds) == 3 and min(seconds) > 0
    assert runner.cached == 20
    before = runner.forward([1], DraftTree(), RequiredOutputs()).logits
    runner.commit([])
    runner.truncate(20)
    step_cost.step_seconds(runner, step_cost.bushy(9, runner.vocab_size), context=20)
    torch.testing.assert_close(runner.forward([1], DraftTree(), RequiredOutputs()).logits, before)
