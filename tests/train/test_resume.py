"""A run that is killed, stopped by a signal or by an error, and then resumed ends like an uninterrupted one."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.train.conftest import read_losses
from train.cli import run_lightning

BATCHES, BATCHES_PER_EPOCH = 50, 5  # of `write_run`
KILLS = [None, ("fsync", 1), None, ("replace", 2), ("symlink", 1), None, ("remove", 1)]
"""Moments: in the nth call of a function of `os` within a save, or at random."""


def die_in(name, nth):
    """Return a function that kills the process in its ``nth`` call of a function of `os`, with half a file written."""

    def prepare():
        real, calls = getattr(os, name), []

        def call(*args, **kwargs):
            calls.append(args)
            if len(calls) == nth:
                if name == "fsync":
                    os.truncate(f"/proc/self/fd/{args[0]}", os.fstat(args[0]).st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(os, name, call)

    return prepare


def kill_at_random(run, losses, rng, latest):
    """Kill a run at any point of a batch, a validation or a save, soon after a random batch up to ``latest``.

    Args:
        run: The running training.
        losses: File that holds a line for each batch trained so far, by this run and by the ones before it.
        rng: Draws the batch, and the moment within it.
        latest: Number of batches, counted from the start of training.
    """
    before = len(read_batches(losses))
    wanted = rng.randint(1, latest)
    while not any(batch >= wanted for batch in read_batches(losses)[before:]):
        assert run.is_alive(), run.log.read_text()
        time.sleep(0.001)
    time.sleep(rng.random() / 50)
    run.send(signal.SIGKILL)


def read_batches(losses):
    """Return how many batches were trained at each line of the file, counted from the start of training."""
    lines = losses.read_text().split("\n")[:-1] if losses.exists() else []
    places = [line.split()[0].split(".") for line in lines]
    return [int(epoch) * BATCHES_PER_EPOCH + int(batch) + 1 for _, epoch, batch in places]


def assert_same_end(one, other):
    """Check that two runs computed the same loss for every batch and ended with the same weights and optimizer."""
    mine, theirs = read_losses(one), read_losses(other)
    assert mine == theirs
    assert all(len(losses) == 1 for losses in mine.values())
    for name in ("last.ckpt", "best.ckpt"):
        saved = [torch.load(folder / "checkpoints" / name, weights_only=True) for folder in (one, other)]
        for part in ("global_step", "state_dict", "optimizer_states", "lr_schedulers", "measured"):
            torch.testing.assert_close(saved[0][part], saved[1][part], rtol=0, atol=0)
    assert torch.load(one / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 30, "no multiple of 4"


@pytest.mark.slow
def test_kills_at_any_moment_change_no_bit_of_the_losses_and_weights(write_run, fork, tmp_path):
    whole, killed, rng = tmp_path / "whole", tmp_path / "killed", random.Random()
    fork("fit", "--config", write_run(whole)).succeed()
    resumed = "fit", "--config", write_run(killed), "--ckpt_path", "last"
    for number, moment in enumerate(KILLS, start=1):
        run = fork(*resumed, before=die_in(*moment) if moment else bool)
        if not moment:
            kill_at_random(run, killed / "losses.txt", rng, latest=BATCHES * number // 8)
        assert run.wait() == -signal.SIGKILL, run.log.read_text()
    fork(*resumed).succeed()
    assert_same_end(killed, whole)
    assert not list((killed / "checkpoints").glob("*.new")), "temporary files of killed runs are deleted"


@pytest.mark.slow
def test_resuming_from_any_checkpoint_repeats_the_uninterrupted_run(write_run, fork, tmp_path):
    """Within an epoch, between epochs, just before and after a validation, with a process that loads ahead."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    options = "--data.num_workers", 1
    fork("fit", "--config", write_run(whole, every=1, keep=-1, max_steps=5), *options).succeed()
    expected = read_losses(whole)
    for name, trained in {"step=1": 2, "step=3": 5, "step=4": 7, "best": 7}.items():
        shutil.rmtree(resumed, ignore_errors=True)
        config = write_run(resumed, max_steps=5)
        fork("fit", "--config", config, "--ckpt_path", whole / "checkpoints" / f"{name}.ckpt", *options).succeed()
        assert read_losses(resumed) == dict(list(expected.items())[trained:]), name
        if name != "best":  # that validation is over
            best = [torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True) for folder in (whole, resumed)]
            assert best[0]["measured"] == best[1]["measured"]


@pytest.mark.slow
def test_after_an_error_within_an_accumulated_step_its_batches_are_repeated(write_run, fork, tmp_path):
    """The error comes in the second of two accumulated batches, whose gradients no checkpoint holds."""

    def fail():
        from train.module import DrafterTraining

        step = DrafterTraining.training_step

        def training_step(self, batch, batch_idx):
            if (self.current_epoch, batch_idx) == (1, 3):
                raise RuntimeError("out of memory")
            return step(self, batch, batch_idx)

        DrafterTraining.training_step = training_step

    config = write_run(tmp_path, every=1000, max_steps=6)
    run = fork("fit", "--config", config, before=fail)
    assert run.wait() == 70 and "out of memory" in run.log.read_text()
    fork("fit", "--config", config, "--ckpt_path", "last").succeed()
    batches = [line.split()[0] for line in (tmp_path / "losses.txt").read_text().splitlines()]
    first, second = [f"0.{epoch}.{batch}" for epoch in (0, 1) for batch in range(5)][:8], ["0.1.2", "0.1.3", "0.1.4"]
    assert batches == [*first, *second]
    assert all(len(losses) == 1 for losses in read_losses(tmp_path).values())


@pytest.mark.slow
def test_a_run_with_two_processes_resumes_exactly(write_run, fork, tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    two = "--trainer.strategy", "ddp_fork", "--trainer.devices", 2
    fork("fit", "--config", write_run(whole, every=1, keep=-1, max_steps=4), *two).succeed()
    config, checkpoint = write_run(resumed, max_steps=4), whole / "checkpoints" / "step=2.ckpt"
    fork("fit", "--config", config, "--ckpt_path", checkpoint, *two).succeed()
    again, expected = read_losses(resumed), read_losses(whole)
    assert {batch.split(".")[0] for batch in again} == {"0", "1"} and len(expected) > len(again)
    assert again == {batch: expected[batch] for batch in again}
    assert len(set.union(*expected.values())) == len(expected), "each process draws its own anchors"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--data.files", "[embedded:24:100]", "the training text was 20 conversations"),
        ("--data.max_length", 120, "the training text was 20 conversations"),
        ("--data.batch_size", 5, "data.batch_size was 4, is 5"),
        ("--data.seed", 7, "data.seed was 0, is 7"),
        ("--model.base", "other", "whose weights_hash is not that of"),
    ],
)
def test_other_data_and_another_base_are_refused_by_name(trained, call, make_tiny, tmp_path, option, value, said):
    value = make_tiny("other-base", seed=5) if value == "other" else value
    words = "fit", "--config", trained.config, "--trainer.default_root_dir", tmp_path, "--ckpt_path", trained.ckpt
    assert said in call(run_lightning, *words, option, value).one_line_error("lightning")


@pytest.mark.slow
def test_other_data_are_accepted_on_request(trained, call, write_recipe, tmp_path):
    words = "fit", "--config", write_recipe(tmp_path, max_steps=9), "--ckpt_path", trained.ckpt
    assert call(run_lightning, *words, "--data.batch_size", 5, "--resume.other_data", "true").code == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["learning_rate", "weight_decay"])
def test_what_the_state_of_the_optimizer_keeps_cannot_be_changed(trained, call, write_recipe, tmp_path, name):
    words = "fit", "--config", write_recipe(tmp_path, max_steps=9), "--ckpt_path", trained.ckpt
    error = call(run_lightning, *words, f"--model.{name}", 0.5).one_line_error("lightning")
    assert f"model.{name} was" in error and "is 0.5" in error and "--model.initial_drafter" in error


@pytest.mark.slow
def test_with_other_batches_the_learning_rate_goes_on_from_the_same_share_of_the_epochs(call, write_run, tmp_path):
    """The six steps were half of four epochs; with batches twice as large these have four steps."""
    words = ["fit", "--config", write_run(tmp_path, every=1, keep=-1), "--model.schedule", "linear"]
    words += ["--model.warmup_steps", 0, "--trainer.max_epochs", 4, "--trainer.max_steps", -1]
    assert call(run_lightning, *words).code == 0
    before = torch.load(tmp_path / "checkpoints" / "step=6.ckpt", weights_only=True)
    (scheduler,) = before["lr_schedulers"]
    (full, *_), (rate, *_) = scheduler["base_lrs"], scheduler["_last_lr"]
    assert before["steps_per_epoch"] == 3 and rate == pytest.approx(full / 2)
    words += ["--data.batch_size", 10, "--resume.other_data", "true", "--trainer.default_root_dir", tmp_path / "other"]
    assert call(run_lightning, *words, "--ckpt_path", tmp_path / "checkpoints" / "step=6.ckpt").code == 0
    after = torch.load(tmp_path / "other" / "checkpoints" / "step=7.ckpt", weights_only=True)
    assert after["lr_schedulers"][0]["_last_lr"][0] == pytest.approx(full / 4)


# ---- signals


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
def test_a_signal_saves_a_checkpoint_from_which_the_run_continues_exactly(write_run, fork, tmp_path, number, code):
    config = write_run(tmp_path, every=1000, max_steps=10**6)
    run = fork("fit", "--config", config)
    wait_for(lambda: (tmp_path / "losses.txt").exists() and len(read_losses(tmp_path)) > 8, run)
    run.send(number)
    assert run.wait() == code, run.log.read_text()
    assert "go on with --ckpt_path last" in run.log.read_text()
    done = read_losses(tmp_path)
    step = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
    assert not any((tmp_path / "checkpoints").glob("step=*")), "the one checkpoint is the signal's"
    fork("fit", "--config", config, "--ckpt_path", "last", "--trainer.max_steps", step + 3).succeed()
    assert set(read_losses(tmp_path)) > set(done)
    assert all(len(losses) == 1 for losses in read_losses(tmp_path).values())


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
        fork(*options).succeed()
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
    until = time.monotonic() + 120
    while run.is_alive():  # on a busy machine the first may be noted late, and the next come within its second
        assert time.monotonic() < until, run.log.read_text()
        run.send(signal.SIGINT)
        time.sleep(0.1)
    assert run.wait() == -signal.SIGINT


@pytest.mark.slow
def test_a_signal_to_one_process_ends_both_at_the_same_step(write_run, tmp_path, repository):
    """The first starts the second by its own command line, and so is a fresh interpreter too."""
    words = ["fit", "--config", write_run(tmp_path, every=1000, max_steps=10**6), "--config", "strategy/ddp.yaml"]
    command = [sys.executable, "-m", "train", *map(str, words), "--trainer.devices", "2"]
    with (tmp_path / "log.txt").open("w+") as log:
        run = subprocess.Popen(command, cwd=repository, stdout=log, stderr=log)
        try:
            while run.poll() is None and not (tmp_path / "losses.txt").exists():
                time.sleep(0.01)
            run.send_signal(signal.SIGTERM)
            assert run.wait(120) == 143, Path(log.name).read_text()
        finally:
            run.kill()
    ranks = [{batch[2:] for batch in read_losses(tmp_path) if batch[0] == rank} for rank in "01"]
    assert ranks[0] == ranks[1]
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] > 0
