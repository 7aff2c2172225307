"""The estimates of a training's memory and time, compared with what a loss really keeps and with arithmetic."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import drafters
from drafters import recipe
from train.callbacks import estimate, memory
from train.cli import lightning_command
from train.modules.drafter_training import DrafterTraining

KINDS = {
    "CTC": {"num_frames": 6, "num_labels": 4, "num_layers": 2, "markov_rank": 4, "num_anchors": 80},
    "Block": {"num_frames": 4, "num_anchors": 80},
    "Medusa": {"num_heads": 3, "num_anchors": 80},
    "Hydra": {"num_heads": 3, "prefix_attention": True, "num_anchors": 80},
    "EAGLE": {},
    "EAGLE3": {"hidden_layers": (0, 1, -1), "num_unroll": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_activations_of_long_texts_are_extrapolated_from_short_ones(tiny, tiny_base, kind):
    drafter = recipe.build(getattr(drafters, kind), tiny_base.shape, KINDS[kind])
    size = memory.BatchSize(num_rows=3, num_positions=300, num_anchors=80)
    estimated = memory.drafter_activations(drafter, tiny_base.shape, tiny_base.base_weights, size)
    kept = memory.kept_bytes(drafter, tiny_base.shape, tiny_base.base_weights, size)
    assert estimated == pytest.approx(kept, rel=0.05)


def test_the_estimate_leaves_the_random_generator_as_it_was(tiny_base):
    drafter = recipe.build(drafters.CTC, tiny_base.shape, KINDS["CTC"])
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    memory.kept_bytes(drafter, tiny_base.shape, tiny_base.base_weights, memory.BatchSize(1, 32, 8))
    assert torch.equal(torch.rand(4), expected)


def test_weights_gradients_and_states_are_counted(tiny):
    module = DrafterTraining(str(tiny), partial(recipe.build, drafters.Medusa, init_args={"num_heads": 2}))
    trainer = SimpleNamespace(strategy=None, world_size=1)
    parts = memory.estimate_memory(module, trainer, 4, 100)
    weights = 4 * sum(weight.numel() for weight in module.drafter.parameters())
    assert parts["weights of the drafter"] == parts["their gradients"] == parts["their AdamW states"] / 2 == weights
    assert parts["weights of the base"] == 4 * sum(weight.numel() for weight in module.base.model.parameters())
    assert parts["hidden states of the base"] == 4 * 100 * 2 * 32 * 4, "what the drafter reads, and the last state"
    assert max(parts.values()) < memory.peak_memory(parts) < sum(parts.values())


@pytest.mark.parametrize(
    ("batch_size", "max_tokens", "expected"), [(8, None, (8, 40)), (8, 160, (4, 40)), (2, 160, (2, 40))]
)
def test_the_largest_batch_holds_the_longest_rows(batch_size, max_tokens, expected):
    settings = SimpleNamespace(batch_size=batch_size, max_tokens=max_tokens)
    assert memory.largest_batch([10, 40, 20], settings) == expected


@pytest.mark.slow
def test_a_training_prints_its_memory_before_the_first_step_and_its_time_after_some_steps(call, write_recipe, tmp_path):
    steps = estimate.NUM_STEPS + 10
    config = write_recipe(tmp_path, max_steps=steps, val_check_interval=steps)
    done = call(lightning_command.main, "fit", "--config", config)
    assert done.code == 0, done.err
    assert "memory of a device, for a batch of 4 texts of 160 tokens" in done.out
    assert re.search(r"at the worst moment\W+\d+\.\d\d [kM]B", done.out)
    assert re.search(r" s a batch: 8 more take about \d+:\d\d:\d\d", done.out)


def test_too_little_memory_is_reported_with_the_options_that_lower_it(capsys):
    parts = {"weights of the base": 20e9, "the base's forward": 5e9, "the drafter's activations": 4e9}
    estimate.show_memory(parts, 4, 2048, int(24e9))
    said = " ".join(capsys.readouterr().out.split())
    assert "25.00 GB of 24.00 GB" in said and "lower data.batch_size" in said
    estimate.show_memory(parts, 4, 2048, int(48e9))
    assert "lower" not in capsys.readouterr().out
