"""The estimates of a training's memory and time, compared with what a loss really keeps and with arithmetic."""

import re
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import drafters
from drafters import recipe
from drafters.protocol import TrainingBatch
from train.callbacks import estimate, memory, rehearsal
from train.callbacks.averaged_weights import AveragedWeights
from train.cli import lightning_command
from train.module import DrafterTraining

KINDS = {
    "CTC": {"num_frames": 6, "num_labels": 4, "num_layers": 2, "markov_rank": 4, "num_anchors": 80},
    "Block": {"num_frames": 4, "num_anchors": 80},
    "Medusa": {"num_heads": 3, "num_anchors": 80},
    "Hydra": {"num_heads": 3, "prefix_attention": True, "num_anchors": 80},
    "EAGLE": {},
    "EAGLE3": {"hidden_layers": (0, 1, -1), "num_unroll": 3},
}


def step_of(drafter, base, size):
    """Bytes that a real training step takes, by phase."""
    weights, ids = base.base_weights, torch.zeros(size, dtype=torch.long)
    states = torch.rand(*size, base.shape.hidden_size)
    hidden = states.repeat(1, 1, len(drafter.required_outputs.hidden_layers))
    batch = TrainingBatch(hidden, states, ids, ids, torch.ones_like(ids, dtype=torch.bool))
    optimizer = torch.optim.AdamW(drafter.parameters())
    with rehearsal.LiveBytes(*drafter.parameters(), weights.embedding, weights.head, hidden, states, ids) as live:
        loss, _ = drafter.loss(batch, weights)
        forward = live.restart()
        loss.backward()
        backward = live.restart()
        optimizer.step()
        live.restart()
        optimizer.step()
    gradients = sum(weight.grad.nbytes for weight in drafter.parameters() if weight.grad is not None)
    return forward, backward - gradients, live.peak - live.now


@pytest.mark.parametrize("kind", KINDS)
def test_a_rehearsal_takes_what_a_real_step_does(tiny_base, kind):
    drafter = recipe.build(getattr(drafters, kind), tiny_base.shape, KINDS[kind])
    size = rehearsal.BatchSize(num_rows=2, num_positions=150)
    torch.manual_seed(3)
    rehearsed = (
        *rehearsal.rehearse(drafter, tiny_base.base_weights, size),
        memory.adamw_temporaries(drafter.parameters(), is_gpu=False),
    )
    assert all(weight.grad is None for weight in drafter.parameters())
    torch.manual_seed(3)
    assert rehearsed == pytest.approx(step_of(drafter, tiny_base, size), rel=0.01)


def test_the_estimate_leaves_the_random_generator_as_it_was(tiny_base):
    drafter = recipe.build(drafters.CTC, tiny_base.shape, KINDS["CTC"])
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    rehearsal.rehearse(drafter, tiny_base.base_weights, rehearsal.BatchSize(1, 32))
    assert torch.equal(torch.rand(4), expected)


def test_weights_gradients_and_states_are_counted(tiny):
    module = DrafterTraining(str(tiny), partial(recipe.build, drafters.Medusa, init_args={"num_heads": 2}))
    trainer = SimpleNamespace(strategy=None, world_size=1, accumulate_grad_batches=1, callbacks=[])
    parts = memory.estimate_memory(module, trainer, 4, 100)
    weights = 4 * sum(weight.numel() for weight in module.drafter.parameters())
    assert parts["weights of the drafter"] == parts["their gradients"] == parts["their AdamW states"] / 2 == weights
    assert parts["weights of the base"] == 4 * sum(weight.numel() for weight in module.base.model.parameters())
    assert parts["hidden states of the base"] == 4 * 100 * 2 * 32 * 4, "what the drafter reads, and the last state"
    assert max(parts.values()) < memory.peak_memory(parts) < sum(parts.values())
    trainer.callbacks.append(AveragedWeights())
    assert memory.estimate_memory(module, trainer, 4, 100)["weights of the drafter"] == 2 * weights


@pytest.mark.parametrize(
    ("batch_size", "max_tokens", "expected"), [(8, None, (8, 40)), (8, 160, (4, 40)), (2, 160, (2, 40))]
)
def test_the_largest_batch_holds_the_longest_rows(batch_size, max_tokens, expected):
    settings = SimpleNamespace(batch_size=batch_size, max_tokens=max_tokens)
    assert memory.largest_batch([10, 40, 20], settings) == expected


# M_MMAP_THRESHOLD of 64 KiB, which training would raise: the allocator keeps little that is freed.
MEASURED_FIT = """
import ctypes, sys
ctypes.CDLL(None).mallopt(-3, 2**16)
from benchmarks.harness import resident_bytes
from train.callbacks import estimate, freed_memory
from train.cli import lightning_command
freed_memory.keep_freed_memory = bool
lightning_command.main(sys.argv[1:])
print("peak", estimate.readable(resident_bytes()[1]))
"""


@pytest.mark.slow
def test_the_estimate_is_the_peak_of_a_training(make_tiny, write_recipe, tmp_path, repository):
    """In a process of its own: a fork takes what its parent has freed without growing."""
    options = ["--model.base", make_tiny("medium", hidden_size=512, vocab_size=8000)]
    options += ["--model.drafter.init_args.loss.num_anchors", 64]
    recipe_file = write_recipe(tmp_path, max_steps=2, limit_val_batches=0)
    words = [sys.executable, "-c", MEASURED_FIT, "fit", "--config", recipe_file, *options]
    run = subprocess.run([str(word) for word in words], capture_output=True, text=True, cwd=repository)
    said, units = run.stdout + run.stderr, {"MB": 1.0, "GB": 1000.0}
    assert run.returncode == 0, said
    sizes = [re.search(rf"{name}\W+([\d.]+) (.B)", said) for name in ("libraries and texts", "worst moment", "peak")]
    process, estimated, peak = (float(size[1]) * units[size[2]] for size in sizes)
    assert estimated == pytest.approx(peak, rel=0.05)
    assert estimated - process == pytest.approx(peak - process, rel=0.15)


def test_a_drafter_whose_memory_cannot_be_estimated_is_trained_all_the_same(call, write_recipe, tmp_path, monkeypatch):
    loss = drafters.CTC.loss

    def reading_loss(self, batch, base_weights):
        value, metrics = loss(self, batch, base_weights)
        assert value.item() > 0
        return value, metrics

    monkeypatch.setattr(drafters.CTC, "loss", reading_loss)
    done = call(lightning_command.main, "fit", "--config", write_recipe(tmp_path, max_steps=1, limit_val_batches=0))
    assert done.code == 0, done.err
    assert "the memory of CTC cannot be estimated" in done.out and "worst moment" not in done.out


@pytest.mark.slow
def test_a_training_prints_its_memory_before_the_first_step_and_its_time_after_some_steps(call, write_recipe, tmp_path):
    steps = estimate.NUM_STEPS + 10
    config = write_recipe(tmp_path, max_steps=steps, val_check_interval=steps)
    done = call(lightning_command.main, "fit", "--config", config)
    assert done.code == 0, done.err
    assert "memory of a device, for a batch of 4 texts of 160 tokens" in done.out
    assert re.search(r"at the worst moment\W+\d+\.\d\d [kMG]B", done.out)
    assert re.search(r" s a batch: 8 more take about \d+:\d\d:\d\d", done.out)


def test_too_little_memory_is_reported_with_the_options_that_lower_it(capsys):
    parts = {"weights of the base": 20e9, "the base's forward": 5e9, "the drafter's activations": 4e9}
    estimate.show_memory(parts, 4, 2048, int(24e9))
    said = " ".join(capsys.readouterr().out.split())
    assert "25.00 GB of 24.00 GB" in said and "lower data.batch_size" in said
    estimate.show_memory(parts, 4, 2048, int(48e9))
    assert "lower" not in capsys.readouterr().out


def test_the_time_left_is_not_named_where_only_time_limits_the_training(capsys):
    estimate.show_time(0.5, torch.inf, 10**6)
    assert capsys.readouterr().out == "0.5 s a batch; peak memory so far 1.00 MB\n"
