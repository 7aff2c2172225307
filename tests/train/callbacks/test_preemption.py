"""Signals end a run with a checkpoint and the exit code that schedulers expect."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from train.checkpointing.checkpoint_reader import read_checkpoint

ROOT = Path(__file__).parents[3]


def wait_for(condition, run):
    until = time.monotonic() + 120
    while not condition():
        assert run.is_alive() and time.monotonic() < until, run.log.read_text()
        time.sleep(0.001)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGINT, 130)],
    ids=lambda value: str(value),
)
def test_a_signal_saves_a_checkpoint_from_which_the_run_continues_exactly(
    write_run, fork, losses_of, tmp_path, number, code
):
    config = write_run(tmp_path, every=1000, max_steps=10**6)
    run = fork("fit", "--config", config)
    wait_for(lambda: (tmp_path / "losses.txt").exists() and len(losses_of(tmp_path)) > 8, run)
    run.send(number)
    assert run.wait() == code, run.log.read_text()
    assert "go on with --ckpt_path last" in run.log.read_text()
    done = losses_of(tmp_path)
    step = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
    assert not any((tmp_path / "checkpoints").glob("step=*")), "the one checkpoint is the signal's"
    run = fork("fit", "--config", config, "--ckpt_path", "last", "--trainer.max_steps", step + 3)
    assert run.wait() == 0, run.log.read_text()
    assert set(losses_of(tmp_path)) > set(done)
    assert all(len(losses) == 1 for losses in losses_of(tmp_path).values())


@pytest.mark.slow
def test_a_validation_interrupted_by_a_signal_is_repeated_from_its_start(write_run, fork, tmp_path):
    """The signal comes in the second validation batch; the first is neither counted twice nor left out."""

    def stop_in_validation():
        from train.module import DrafterTraining

        validate = DrafterTraining.validation_step

        def validation_step(self, batch, batch_idx):
            if not self.trainer.sanity_checking and batch_idx == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return validate(self, batch, batch_idx)

        DrafterTraining.validation_step = validation_step

    measured = {}
    for name in ("whole", "stopped"):
        config = write_run(tmp_path / name, max_steps=5)
        options = "fit", "--config", config, "--data.batch_size", 2, "--trainer.val_check_interval", 6
        if name == "stopped":
            run = fork(*options, before=stop_in_validation)
            assert run.wait() == 143, run.log.read_text()
            options = *options, "--ckpt_path", "last"
        run = fork(*options)
        assert run.wait() == 0, run.log.read_text()
        best = torch.load(tmp_path / name / "checkpoints" / "best.ckpt", weights_only=True)
        measured[name] = best["measured"], best["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["processed"]
    assert measured["stopped"] == measured["whole"]


@pytest.mark.slow
def test_ctrl_c_twice_ends_a_run_at_once(write_run, fork, tmp_path):
    def never_ends():
        from train.module import DrafterTraining

        DrafterTraining.training_step = lambda self, batch, batch_idx: (
            (tmp_path / "in_step").touch(),
            time.sleep(600),
        )

    run = fork("fit", "--config", write_run(tmp_path), before=never_ends)
    wait_for((tmp_path / "in_step").exists, run)
    run.send(signal.SIGINT)
    time.sleep(1.2)
    assert run.is_alive()
    run.send(signal.SIGINT)
    assert run.wait() == -signal.SIGINT


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_benchmark_ends_with_the_exit_code_of_its_training(fork, tiny, tmp_path, number, code):
    def benchmark():
        from benchmarks import experiment
        from train.module import DrafterTraining

        train = DrafterTraining.training_step

        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                os.kill(os.getpid(), number)
            return train(self, batch, batch_idx)

        DrafterTraining.training_step = training_step
        arm = experiment.Arm("medusa", "Medusa", {"num_heads": 2, "num_anchors": 8})
        experiment.train(
            arm,
            0,
            experiment.SharedSettings(str(tiny), ["embedded:24"], steps=100, batch_size=4, max_length=96),
            tmp_path,
        )

    run = fork(before=benchmark)
    assert run.wait() == code, run.log.read_text()
    assert read_checkpoint(tmp_path / "medusa" / "seed0" / "checkpoints" / "last.ckpt")["global_step"] == 3


@pytest.mark.slow
def test_a_signal_to_one_process_ends_both_at_the_same_step(write_run, tmp_path):
    config, log = write_run(tmp_path, every=1000, max_steps=10**6), tmp_path / "log.txt"
    with log.open("w") as stream:
        command = [sys.executable, "-m", "train", "fit", "--config", str(config), "--trainer.devices", "2"]
        run = subprocess.Popen(
            [*command, "--trainer.strategy", "ddp"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=stream,
            stderr=stream,
        )
    try:
        until = time.monotonic() + 180
        while not (tmp_path / "losses.txt").exists():
            assert run.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.01)
        run.send_signal(signal.SIGTERM)
        assert run.wait(120) == 143, log.read_text()
    finally:
        run.kill()
    batches = [line.split()[0] for line in (tmp_path / "losses.txt").read_text().splitlines()]
    assert {b[2:] for b in batches if b[0] == "0"} == {b[2:] for b in batches if b[0] == "1"}
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] > 0
