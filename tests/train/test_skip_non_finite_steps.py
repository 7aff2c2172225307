"""Steps whose loss or gradient is not finite are skipped by all processes, and counted."""

import re

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from tests.train.conftest import QUIET
from train.callbacks import SkipNonFiniteSteps
from train.cli import run_lightning

NAN, INF = float("nan"), float("inf")


class Line(L.LightningModule):
    """A linear model whose loss is multiplied by a factor that a table gives for each batch and rank."""

    def __init__(self, factors, gradient_factors=None):
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(3, 1)
        self.factors, self.gradient_factors, self.seen = factors, gradient_factors or {}, []

    def training_step(self, batch, batch_idx):
        loss = self.line(batch["x"]).pow(2).mean()
        if factor := self.gradient_factors.get(batch_idx):
            loss.register_hook(lambda gradient: gradient * factor)
        return loss * self.factors.get((batch_idx, self.global_rank), 1.0)

    def on_train_batch_end(self, *args):
        state = [entry["step"].item() for entry in self.optimizers().state.values()]
        self.seen.append((self.line.weight.detach().clone(), state[0] if state else 0))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.1)


def fit(module, faults, num_batches=6, others=(), **trainer):
    rows = [{"x": torch.full((3,), i + 1.0)} for i in range(num_batches)]
    settings = {"max_epochs": 1, "enable_checkpointing": False, "use_distributed_sampler": False}
    runs = L.Trainer(**QUIET | settings | trainer, callbacks=[faults, *others])
    runs.fit(module, torch.utils.data.DataLoader(rows, batch_size=1))
    return runs


@pytest.mark.parametrize("factor", [NAN, INF, -INF])
def test_a_loss_that_is_not_finite_changes_neither_weights_nor_optimizer(factor):
    module, faults = Line({(2, 0): factor, (3, 0): factor}), SkipNonFiniteSteps()
    trainer = fit(module, faults)
    weights, steps = zip(*module.seen, strict=True)
    assert steps == (1, 2, 2, 2, 3, 4)
    assert torch.equal(weights[1], weights[3]) and not torch.equal(weights[3], weights[4])
    assert faults.state_dict() == {"skipped_steps": 2, "skipped_in_a_row": 0}
    assert trainer.callback_metrics["train/skipped_steps"] == 2
    assert trainer.global_step == 6, "a skipped step is a step of the schedule"


def test_a_gradient_that_is_not_finite_is_skipped_even_if_the_loss_is_finite():
    module, faults = Line({}, {1: NAN}), SkipNonFiniteSteps()
    fit(module, faults)
    assert faults.skipped_steps == 1 and module.line.weight.isfinite().all()


def test_without_faulty_steps_the_weights_are_the_same_bit_for_bit():
    module, plain = Line({}), Line({})
    fit(module, SkipNonFiniteSteps(), accumulate_grad_batches=2, gradient_clip_val=0.5)
    fit(plain, L.Callback(), accumulate_grad_batches=2, gradient_clip_val=0.5)
    assert all(torch.equal(one[0], other[0]) for one, other in zip(module.seen, plain.seen, strict=True))


def test_one_bad_batch_skips_the_entire_accumulated_step():
    module, faults = Line({(0, 0): NAN}), SkipNonFiniteSteps()
    fit(module, faults, accumulate_grad_batches=2)
    assert [step for _, step in module.seen] == [0, 0, 0, 1, 1, 2]
    assert faults.skipped_steps == 1


@pytest.mark.slow
def test_too_many_consecutive_skipped_steps_end_the_run_and_name_what_to_lower():
    bad = {(batch, 0): NAN for batch in range(1, 5)}
    with pytest.raises(ValueError, match=r"3 steps in a row, up to step 4, had a loss .* lower model.learning_rate"):
        fit(Line(bad), SkipNonFiniteSteps(max_skipped=2))
    fit(Line(bad), SkipNonFiniteSteps(max_skipped=4))
    with pytest.raises(ValueError, match=r"max_skipped must be at least 0, not -1"):
        SkipNonFiniteSteps(max_skipped=-1)


@pytest.mark.slow
@pytest.mark.parametrize("clip", ["value", "norm"])
def test_a_training_whose_learning_rate_is_far_too_high_ends_in_one_line_however_it_clips(
    call, write_recipe, tmp_path, clip
):
    options = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": clip}
    config = write_recipe(tmp_path, {"learning_rate": 1e20}, max_steps=40, val_check_interval=2, **options)
    words = "--non_finite.max_skipped", 3, "--data.files", "[embedded:24:100]"
    line = call(run_lightning, "fit", "--config", config, *words).one_line_error("lightning")
    assert re.search(r"4 steps in a row, up to step \d+, had a loss or gradient that is not finite: train anew", line)


class Told(L.Callback):
    """Prints at the end of each process whether its weights equal those of the others."""

    def on_train_end(self, trainer, module):
        steps = torch.tensor([float(step) for _, step in module.seen])
        for mine in (module.line.weight.detach(), steps):
            everyone = trainer.strategy.all_gather(mine)
            assert torch.equal(everyone[0], everyone[1])
        assert steps.tolist() == [1, 2, 2, 3, 4, 5]


@pytest.mark.slow
def test_all_processes_skip_a_step_that_is_not_finite_in_one_of_them():
    module = Line({(2, 1): NAN})
    strategy = DDPStrategy(start_method="fork", process_group_backend="gloo")
    trainer = fit(module, SkipNonFiniteSteps(), strategy=strategy, devices=2, others=[Told()])
    assert trainer.callback_metrics["train/skipped_steps"] == 1


def test_a_resumed_run_continues_the_counts():
    before, after = SkipNonFiniteSteps(), SkipNonFiniteSteps(max_skipped=1)
    fit(Line({(5, 0): NAN}), before)
    after.load_state_dict(before.state_dict())
    with pytest.raises(ValueError, match="2 steps in a row, up to step 1,"):
        fit(Line({(0, 0): NAN}), after)
    assert after.skipped_steps == 2
