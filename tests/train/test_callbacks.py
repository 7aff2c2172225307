"""What a run logs, from which clock and gradients."""

import csv
import math
import re
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import Timer

from train import callbacks
from train.callbacks import Speed
from train.cli import run_lightning

TIME = r"\d+:\d\d:\d\d"
SEEN = {
    *("train/loss", "train/blank_share", "train/tokens_per_second", "train/utilisation"),
    *("train/learning_rate", "train/gradient_norm", "val/loss", "val/acceptance_length"),
    *(f"val/accepted_{depth}_or_more" for depth in range(1, 9)),
    *(f"val/accepted_{depth}_given_{depth - 1}" for depth in range(1, 9)),
}


def set_clock(monkeypatch, **functions):
    """Give the callbacks a clock of their own: the event loops of servers in this process keep the real one."""
    real = {"monotonic": time.monotonic, "perf_counter": time.perf_counter}
    monkeypatch.setattr(callbacks, "time", SimpleNamespace(**real | functions))


@pytest.mark.slow
def test_every_run_logs_speed_acceptance_by_depth_and_gradient_norms(call, write_recipe, tmp_path):
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": str(tmp_path), "name": "log", "version": 0}}
    config = write_recipe(tmp_path, logger=logger, log_every_n_steps=2, callbacks=None, gradient_clip_val=1e-3)
    assert call(run_lightning, "fit", "--config", config).code == 0
    with (tmp_path / "log" / "version_0" / "metrics.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert rows[0].keys() >= SEEN
    for name in SEEN:
        values = [float(row[name]) for row in rows if row[name]]
        assert len(values) == (4 if name.startswith("train") else 2) and all(map(math.isfinite, values)), name
    at = {name: [float(row[name]) for row in rows if row[name]] for name in SEEN}
    assert at["train/learning_rate"] == pytest.approx([0.01] * 4)
    assert min(at["train/gradient_norm"]) > 1e-3, "the norm is that before clipping"
    assert all(0 < share <= 1 for share in at["train/utilisation"])
    for row in range(2):
        product = 1.0
        for depth in range(1, 9):
            product *= at[f"val/accepted_{depth}_given_{depth - 1}"][row]
            assert product == pytest.approx(at[f"val/accepted_{depth}_or_more"][row])


def test_speed_counts_tokens_without_padding_and_time_without_validation(monkeypatch):
    """Two steps of 3 s after 1 s of waiting each, with a validation of 100 s between them."""
    clock = iter([1.0, 4.0, 104.0, 105.0, 108.0, 108.0])
    set_clock(monkeypatch, perf_counter=clock.__next__)
    logged = {}
    module = SimpleNamespace(
        device=torch.device("cpu"), log=lambda name, value, **how: logged.update({name: float(value)})
    )
    of_validation = {"state": SimpleNamespace(fn="fit"), "sanity_checking": True, "callback_metrics": {}}
    trainer = SimpleNamespace(global_step=0, log_every_n_steps=2, **of_validation)
    batch, speed = {"lengths": torch.tensor([10, 6])}, Speed()
    speed.on_train_start(trainer, module)
    for step in (1, 2):
        speed.on_train_batch_start(trainer, module, batch, 0)
        trainer.global_step = step
        speed.on_train_batch_end(trainer, module, None, batch, 0)
        assert bool(logged) == (step == 2)
        if step == 1:
            speed.on_validation_start(trainer, module)
            speed.on_validation_end(trainer, module)
    assert logged == {"train/tokens_per_second": pytest.approx(2 * 16 / 7), "train/utilisation": pytest.approx(6 / 7)}


def test_the_time_left_ends_with_the_last_step_or_the_limit_of_time(monkeypatch, capsys):
    """Steps of 2 s, of 1,000; after the second there are 5 minutes left."""
    clock = iter([0.0, 2.0, 2.0, 2.0, 4.0, 4.0])
    set_clock(monkeypatch, perf_counter=clock.__next__)
    module = SimpleNamespace(device=torch.device("cpu"), log=lambda *_, **__: None)
    timer = Timer(timedelta(minutes=5))
    trainer = SimpleNamespace(global_step=0, log_every_n_steps=1, estimated_stepping_batches=1000, callbacks=[timer])
    trainer.is_global_zero = True
    batch, speed = {"lengths": torch.tensor([16])}, Speed()
    speed.on_train_start(trainer, module)
    for trainer.global_step in (1, 2):
        speed.on_train_batch_start(trainer, module, batch, 0)
        speed.on_train_batch_end(trainer, module, None, batch, 0)
    assert "2 s a step: 150 more take about 0:05:00" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("minutes", [0, 1])
def test_each_validation_and_without_a_progress_bar_each_minute_says_how_far_the_training_is(
    call, write_recipe, tmp_path, monkeypatch, minutes
):
    clock = iter(range(0, 10**6, 60 * minutes or 1))
    set_clock(monkeypatch, monotonic=clock.__next__)
    said = call(run_lightning, "fit", "--config", write_recipe(tmp_path, log_every_n_steps=2)).succeeded().out
    lines = re.findall(
        rf"^step (\d), ((?:acceptance .* )?loss .*tokens a second): \d more take about {TIME}", said, re.M
    )
    if not minutes:
        assert [step for step, _ in lines] == ["4", "8"], "after a validation"
    assert {int(step) for step, _ in lines} == (set(range(2, 9)) if minutes else {4, 8})
    numbers = r"acceptance length \d\.\d{3}, loss \d+\.\d{3}, [\d,]+ tokens a second"
    assert all(re.fullmatch(numbers, shown) for step, shown in lines if int(step) > 4)


@pytest.mark.slow
def test_a_validation_alone_says_each_minute_how_far_it_is(call, write_recipe, tmp_path, monkeypatch):
    set_clock(monkeypatch, monotonic=iter(range(0, 10**6, 60)).__next__)
    said = call(run_lightning, "validate", "--config", write_recipe(tmp_path)).succeeded().out
    assert re.findall(r"^validation: (\d) of (\d) batches$", said, re.M) == [("1", "1")]


@pytest.mark.slow
def test_the_progress_bar_shows_the_acceptance_length_at_80_columns(call, write_recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": str(tmp_path)}}
    config = write_recipe(tmp_path, logger=logger, enable_progress_bar=True, max_epochs=-1)
    said = call(run_lightning, "fit", "--config", config).succeeded().out
    assert re.search(r"Epoch 1 [^/]*━", said) and "/-2" not in said and "v_num" not in said
    assert re.search(r" acceptance: \d\.\d{3} ", said) and re.search(r" loss: \d+\.\d{3} ", said)
    assert "…" not in said
