"""`lightning fit` and `drafters features` on an accelerator compute what they compute on the host."""

from contextlib import nullcontext
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from benchmarks import recipes
from data.benchmarks import load_questions
from data.conversations import user_message
from drafters import CTC
from inference.prompts import encode_messages
from inference.verifier.base import load_base
from tests.devices import pretend
from train import features
from train.cli import run_drafters
from train.module import DrafterTraining

SMALL = {"num_frames": 6, "num_labels": 4, "num_anchors": 16, "num_nodes": 8, "top_k": 4}


class PretendAccelerator(Accelerator):
    """The pretend device as Lightning takes one."""

    setup_device = teardown = parse_devices = staticmethod(lambda *args: None)
    get_parallel_devices = staticmethod(lambda devices: [pretend.PRETEND])
    auto_device_count = staticmethod(lambda: 1)
    is_available = staticmethod(lambda: True)
    name = staticmethod(lambda: "pretend")


def fit(tiny, rows, folder, around, **place):
    """The metrics of a short training with validation, and the trained weights; the base is loaded on the host."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = DrafterTraining(str(tiny), partial(recipes.build, CTC, init_args=SMALL), max_val_tokens=8)
        mask = torch.arange(rows.shape[1]).expand(len(rows), -1) >= 12
        batch = {"input_ids": rows, "loss_mask": mask, "lengths": torch.full((len(rows),), rows.shape[1])}
        quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
        options = {"max_steps": 2, "accumulate_grad_batches": 2, "num_sanity_val_steps": 0, "val_check_interval": 4}
        trainer = L.Trainer(default_root_dir=folder, **quiet, **options, **place)
        with around:
            trainer.fit(module, DataLoader([batch] * 4, batch_size=None), DataLoader([batch], batch_size=None))
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            return metrics, {name: weight.cpu() for name, weight in module.drafter.state_dict().items()}


@pytest.mark.slow
def test_a_training_with_validation_equals_that_of_the_host(tiny, tiny_base, tmp_path):
    asked = [[user_message(question.turns[0])] for question in load_questions("embedded")[:3]]
    texts = [encode_messages(tiny_base, messages, "tokenizer")[:24] for messages in asked]
    rows = torch.tensor([(text * 24)[:24] for text in texts])
    expected, expected_weights = fit(tiny, rows, tmp_path, nullcontext(), accelerator="cpu", devices=1)
    accelerator = pretend.Accelerator()
    strategy = SingleDeviceStrategy(accelerator.device, PretendAccelerator())
    metrics, weights = fit(tiny, rows, tmp_path, accelerator, strategy=strategy)
    assert accelerator.to_device and "val/acceptance_length" in metrics
    assert metrics == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_feature_store_written_on_an_accelerator_is_that_of_the_host(tiny, tmp_path, monkeypatch):
    def write(name):
        files = ["--files=[embedded:4]", "--max_length=200", "--layers=0,-1", "--dtype=float32"]
        run_drafters(["features", f"--base={tiny}", f"--out={tmp_path / name}", *files])
        return load_file(next((tmp_path / name).glob("*.safetensors")))

    expected = write("host")
    base = load_base(str(tiny), movable=True)
    with pretend.Accelerator() as accelerator:
        monkeypatch.setattr(features, "load_base", lambda *_, **__: base)
        monkeypatch.setattr(features, "resolve_device", lambda _: accelerator.device)
        stored = write("accelerator")
    assert accelerator.to_host
    torch.testing.assert_close(stored, expected)
