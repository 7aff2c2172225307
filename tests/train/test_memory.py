"""The estimate of a training's memory, compared with what a real step keeps and with arithmetic."""

import re
from functools import partial
from types import SimpleNamespace

import lightning as L
import pytest
import torch

import drafters
from drafters import recipe
from drafters.dry_run import dry_run
from drafters.nn.anchor_attention import AnchorMask
from drafters.protocol import TrainingBatch
from train import memory
from train.cli import run_lightning
from train.lightning_cli import DrafterCLI
from train.module import DrafterTraining

KINDS = {
    "CTC": {"trunk": {"num_frames": 6, "num_layers": 2, "markov_rank": 4}, "loss": {"num_labels": 4}},
    "Block": {"trunk": {"num_frames": 4, "llama_layer": True}},
    "Medusa": {"heads": {"num_heads": 3}},
    "Hydra": {"heads": {"num_heads": 3, "prefix_attention": True}},
    "EAGLE": {},
    "EAGLE3": {"hidden_layers": (0, 1, -1), "loss": {"num_unroll": 3}},
}


def bytes_of_a_real_step(drafter, base, size):
    weights, ids = base.base_weights, torch.zeros(size, dtype=torch.long)
    states = torch.rand(*size, base.shape.hidden_size)
    hidden = states.repeat(1, 1, len(drafter.required_outputs.hidden_layers))
    batch = TrainingBatch(hidden, states, ids, ids, torch.ones_like(ids, dtype=torch.bool))
    for weight in drafter.parameters():
        weight.grad = torch.zeros_like(weight)
    existing = [*drafter.parameters(), *(weight.grad for weight in drafter.parameters()), weights.embedding]
    with memory.LiveBytes(*existing, weights.head, hidden, states, ids) as live:
        drafter.loss(batch, weights)[0].backward()
    return live.peak


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_data_takes_what_a_real_step_does_and_changes_nothing(tiny_base, kind):
    drafter = recipe.build(getattr(drafters, kind), tiny_base.shape, KINDS[kind])
    size, before = (2, 150), {name: weight.clone() for name, weight in drafter.state_dict().items()}
    torch.manual_seed(3)
    estimated = memory.step_bytes(drafter, tiny_base.base_weights, size)
    drawn = torch.rand(4)
    assert all(weight.grad is None for weight in drafter.parameters())
    torch.testing.assert_close(drafter.state_dict(), before, rtol=0, atol=0)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4), drawn), "the random generator stays as it was"
    torch.manual_seed(3)
    assert estimated == pytest.approx(bytes_of_a_real_step(drafter, tiny_base, size), rel=0.01)


def test_weights_gradients_and_states_are_counted_by_strategy(tiny):
    module = DrafterTraining(str(tiny), partial(recipe.build, drafters.Medusa, init_args={"heads": {"num_heads": 2}}))
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    parts = memory.memory_parts(module, trainer, (4, 100))
    weights = 4 * sum(weight.numel() for weight in module.drafter.parameters())
    assert parts["weights of the drafter"] == parts["their gradients"] == parts["their AdamW states"] / 2 == weights
    assert parts["weights of the base"] == 4 * sum(weight.numel() for weight in module.base.model.parameters())
    assert parts["hidden states and activations"] > 4 * 100 * 2 * 32 * 4, "what the drafter reads, and the last state"
    two = {"world_size": 2, "precision_plugin": trainer.precision_plugin}
    views = L.pytorch.strategies.DDPStrategy(gradient_as_bucket_view=True)
    copies = L.pytorch.strategies.DDPStrategy()
    for made, shares in ((copies, (1, 2, 2)), (views, (1, 1, 2)), (memory.FSDP2(), (1.5, 0.5, 1))):
        made._parallel_devices = made.parallel_devices = [torch.device("cpu")] * 2
        made.cluster_environment = SimpleNamespace(local_rank=lambda: 0)
        parts = memory.memory_parts(module, SimpleNamespace(strategy=made, **two), (4, 100))
        names = "weights of the drafter", "their gradients", "their AdamW states"
        assert tuple(parts[name] / weights for name in names) == shares


def test_the_mask_of_a_gpu_counts_in_a_step_without_data():
    mask = AnchorMask(torch.arange(0, 320, 5).expand(2, -1), num_frames=6, num_context=320)
    with memory.LiveBytes(mask.anchors) as real:
        mask.sparse()
    with dry_run("cuda"), memory.LiveBytes(mask.anchors) as estimated:
        assert mask.best() is None
    assert estimated.peak == pytest.approx(real.peak, rel=0.01)
    assert estimated.peak > 2 * 384 * 704, "a byte for each frame and key at least"


def test_a_command_keeps_the_gradients_of_ddp_once(call, write_recipe, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(DrafterCLI, "_run_subcommand", lambda cli, _: seen.append(cli.trainer.strategy._ddp_kwargs))
    call(run_lightning, "fit", "--config", write_recipe(tmp_path, strategy="ddp")).succeeded()
    assert seen == [{"gradient_as_bucket_view": True}]


def test_a_drafter_whose_memory_cannot_be_estimated_is_trained_all_the_same(call, write_recipe, tmp_path, monkeypatch):
    loss = drafters.CTC.loss

    def reading_loss(self, batch, base_weights):
        value, metrics = loss(self, batch, base_weights)
        assert value.item() > 0
        return value, metrics

    monkeypatch.setattr(drafters.CTC, "loss", reading_loss)
    done = call(run_lightning, "fit", "--config", write_recipe(tmp_path, max_steps=1, limit_val_batches=0)).succeeded()
    assert "the memory of CTC cannot be estimated" in done.out and "worst moment" not in done.out


def bytes_of(size):
    number, unit = size.split()
    return float(number) * {"kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


@pytest.mark.slow
def test_a_training_prints_its_memory_before_the_first_step_and_its_time_after_some_steps(call, write_recipe, tmp_path):
    config = write_recipe(tmp_path, max_steps=12, val_check_interval=12, log_every_n_steps=3)
    done = call(run_lightning, "fit", "--config", config, "--data.max_tokens", 500).succeeded()
    assert "in a training step on 3 texts of 160 tokens, estimated" in done.out, "as many as 500 tokens allow"
    rows = dict(re.findall(r"│ (\w[\w' ]+\w) +│ +(\d+\.\d\d [kMG]B)", done.out))
    assert rows.keys() >= {"Python and its libraries", "weights of the base", "at the worst moment"}
    parts = [bytes_of(size) for name, size in rows.items() if name != "at the worst moment"]
    assert sum(parts) == pytest.approx(bytes_of(rows["at the worst moment"]), rel=0.01), "what is counted adds up"
    peak = re.search(r"peak memory so far (\S+ .B) of the process", done.out)
    assert bytes_of(rows["at the worst moment"]) < 1.2 * bytes_of(peak[1]), "of the same kind as what is reported later"
    assert re.search(r" s a step: 6 more take about \d+:\d\d:\d\d", done.out)


def test_a_budget_of_tokens_allows_two_largest_batches():
    """Of the longest texts, and of the longest of which a batch has as many as it may."""
    texts = [300, 1000, 1025, 2048]
    assert memory.largest_batches(texts, batch_size=8, max_tokens=8192) == [(4, 2048), (8, 1000)]
    assert memory.largest_batches(texts, batch_size=8, max_tokens=8 * 2048) == [(8, 2048)]
    assert memory.largest_batches(texts, batch_size=8, max_tokens=None) == [(8, 2048)]
    assert memory.largest_batches([2048], batch_size=8, max_tokens=2048) == [(1, 2048)]
