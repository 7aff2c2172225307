"""Averaged weights, against averages that are computed by hand from the weights after each step."""

import threading
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.train.conftest import QUIET
from train.callbacks import AveragedWeights
from train.cli import run_drafters, run_lightning
from train.resume import ExactResume
from train.strategies import FSDP2

DECAY = 0.4


class Line(L.LightningModule):
    """A linear model with an integer buffer, and something frozen beside it as `DrafterTraining` has its base."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(3, 1)
        self.register_buffer("tokens", torch.tensor([0, 1]))
        self.__dict__["base"] = threading.Lock()  # which cannot be copied
        self.trained, self.validated = [], []

    def setup(self, stage):
        self.tokens.copy_(torch.tensor([5, 7]))

    def training_step(self, batch, batch_idx):
        return self.line(torch.full((1, 3), self.global_step + 1.0)).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.validated.append(self.line.weight.detach().clone())

    def on_train_batch_end(self, *args):
        self.trained.append(self.line.weight.detach().clone())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def averages_of(weights):
    """The moving average after each step."""
    averages = [weights[0]]
    for count, weight in enumerate(weights[1:], start=1):
        decay = min(DECAY, (1 + count) / (10 + count))
        averages.append(decay * averages[-1] + (1 - decay) * weight)
    return averages


ROWS = torch.utils.data.DataLoader(range(6))


def fit(module, *others, max_steps=5, ckpt=None, averaging=None, **settings):
    callbacks = [ExactResume(), averaging or AveragedWeights(DECAY), *others]
    options = {"max_steps": max_steps, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    trainer = L.Trainer(**QUIET, **options, **settings, callbacks=callbacks)
    trainer.fit(module, ROWS, ROWS, ckpt_path=ckpt)
    return trainer


class SaveAt(L.Callback):
    """Saves after a step, or in a validation, as a signal does."""

    def __init__(self, path, step, hook):
        self.path, self.step = path, step
        setattr(self, hook, self._save)

    def _save(self, trainer, *args):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_batch_end"])
def test_checkpoints_validation_and_the_end_have_the_averages_and_a_resumed_run_is_the_same(tmp_path, hook):
    module, path = Line(), tmp_path / "middle.ckpt"
    base = module.base
    trainer = fit(module, SaveAt(path, 3, hook), val_check_interval=3)
    averages = averages_of(module.trained)
    trainer.save_checkpoint(tmp_path / "end.ckpt")  # as ModelCheckpoint does at the end, after all other callbacks
    last = torch.load(tmp_path / "end.ckpt", weights_only=True)
    torch.testing.assert_close(last["state_dict"]["line.weight"], averages[4])
    assert torch.equal(last["current_model_state"]["line.weight"], module.trained[4])
    saved = torch.load(path, weights_only=True)
    torch.testing.assert_close(saved["state_dict"]["line.weight"], averages[2])
    torch.testing.assert_close(saved["current_model_state"]["line.weight"], module.trained[2])
    torch.testing.assert_close(module.validated[0], averages[2])
    torch.testing.assert_close(module.line.weight, averages[4])
    assert module.base is base and module.tokens.tolist() == [5, 7]
    again = Line()
    fit(again, ckpt=path)
    torch.testing.assert_close(torch.stack(again.trained[-2:]), torch.stack(module.trained[-2:]), rtol=0, atol=0)
    torch.testing.assert_close(again.line.weight, module.line.weight, rtol=0, atol=0)


def test_a_validation_after_the_training_measures_the_averages():
    module = Line()
    trainer = fit(module)
    trainer.validate(module, ROWS, verbose=False)
    torch.testing.assert_close(module.validated[-1], averages_of(module.trained)[-1])
    torch.testing.assert_close(module.line.weight, averages_of(module.trained)[-1])


@pytest.mark.slow
def test_what_is_exported_is_the_average(call, write_recipe, tmp_path):
    averaged = "--trainer.callbacks+=train.AveragedWeights", "--trainer.callbacks.decay=0.9"
    assert call(run_lightning, "fit", "--config", write_recipe(tmp_path, max_steps=4), *averaged).code == 0
    path, out = tmp_path / "checkpoints" / "last.ckpt", tmp_path / "drafter"
    assert call(run_drafters, "export", path, out).code == 0
    saved, exported = torch.load(path, weights_only=True), load_file(out / "model.safetensors")
    assert saved["state_dict"].keys() == saved["current_model_state"].keys()
    for name, weight in exported.items():
        assert torch.equal(weight, saved["state_dict"][f"drafter.{name}"])
    assert not torch.equal(exported["blank_row"], saved["current_model_state"]["drafter.blank_row"])


def test_sharded_weights_and_a_decay_out_of_range_are_refused():
    with pytest.raises(ValueError, match="DDP"):
        AveragedWeights().setup(SimpleNamespace(strategy=FSDP2()), Line(), "fit")
    for decay in (1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match="decay"):
            AveragedWeights(decay)
