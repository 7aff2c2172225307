"""The step cost command measures every size and restores the cache; no test depends on the times themselves."""

import pytest
import torch

from drafters import DraftTree, RequiredOutputs
from inference.tuning import step_cost
from inference.verifier.runner import Runner


@pytest.mark.parametrize(
    "max_nodes, expected", [(1, [0, 1]), (2, [0, 1, 2]), (3, [0, 1, 2, 3]), (16, [0, 1, 2, 4, 8, 16])]
)
def test_the_measured_sizes_are_zero_powers_of_two_and_the_largest(max_nodes, expected):
    assert step_cost.sizes(max_nodes) == expected


def test_every_size_is_measured_and_the_cache_is_restored(make_base):
    runner = Runner(make_base(dtype=torch.float32))
    seconds = step_cost.measure(runner, [0, 1, 5], context=20, repeats=3)
    assert len(seconds) == 3 and min(seconds) > 0
    assert runner.cached == 20
    before = runner.forward([1], DraftTree(), RequiredOutputs()).logits
    runner.commit([])
    runner.truncate(20)
    step_cost.step_seconds(runner, step_cost.bushy(9, runner.vocab_size), context=20)
    torch.testing.assert_close(runner.forward([1], DraftTree(), RequiredOutputs()).logits, before)
