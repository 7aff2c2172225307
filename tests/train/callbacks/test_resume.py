"""A run that is killed and resumed is the run it would have been."""

import os
import random
import shutil
import signal
import time

import pytest
import torch
import yaml

from train.cli import commands, lightning_command

KILLS_IN_A_SAVE = [("fsync", 1), ("replace", 2), ("symlink", 1), ("remove", 1)]


def die_in(name, nth):
    """Let the process be killed in its ``nth`` call of a function of `os`, with half of the file on the disk."""

    def prepare():
        real, calls = getattr(os, name), []

        def call(*args, **kwargs):
            calls.append(args)
            if len(calls) == nth:
                if name == "fsync":
                    os.ftruncate(args[0], os.fstat(args[0]).st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(os, name, call)

    return prepare


def kill_at_random(run, losses, rng):
    """Kill a run some batches on, anywhere in a batch, a validation or a save."""
    before = losses.read_text().count("\n") if losses.exists() else 0
    wanted = before + rng.randint(1, 12)
    while not losses.exists() or losses.read_text().count("\n") < wanted:
        assert run.is_alive(), run.log.read_text()
        time.sleep(0.001)
    time.sleep(rng.random() / 20)
    run.send(signal.SIGKILL)


@pytest.fixture(scope="module")
def uninterrupted(write_run, fork, tmp_path_factory):
    """Folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run = fork("fit", "--config", write_run(folder))
    assert run.wait() == 0, run.log.read_text()
    return folder


@pytest.fixture(scope="module")
def killed(write_run, fork, tmp_path_factory):
    """Folder of the same run, killed ten times: four times in the middle of a save, and six at random moments."""
    folder, rng = tmp_path_factory.mktemp("killed"), random.Random()
    config = write_run(folder)
    for kill in range(10):
        if kill % 2 and kill // 2 < len(KILLS_IN_A_SAVE):
            before = die_in(*KILLS_IN_A_SAVE[kill // 2])
            run = fork("fit", "--config", config, "--ckpt_path", "last", before=before)
        else:
            run = fork("fit", "--config", config, "--ckpt_path", "last")
            kill_at_random(run, folder / "losses.txt", rng)
        assert run.wait() == -signal.SIGKILL, run.log.read_text()
    run = fork("fit", "--config", config, "--ckpt_path", "last")
    assert run.wait() == 0, run.log.read_text()
    return folder


def test_ten_kills_at_any_moment_change_no_bit_of_the_losses_and_weights(killed, uninterrupted, assert_same_end):
    assert_same_end(killed, uninterrupted)
    assert not list((killed / "checkpoints").glob("*.new")), "what a kill left half written is cleared away"


def test_the_drafter_of_a_run_that_was_killed_loses_nothing(killed, call, tiny, tmp_path):
    assert call(commands.main, "export", killed / "checkpoints" / "last.ckpt", tmp_path / "drafter").code == 0
    verified = call(
        *(commands.main, "verify", "--base", tiny, "--drafter", f"ctc={tmp_path / 'drafter'}"),
        *("--limit", 3, "--max-new-tokens", 24),
    )
    assert verified.code == 0, verified.out
    assert "3/3" in verified.out and "Nothing is lost" in verified.out


def test_each_kind_of_checkpoint_leads_to_the_same_end(write_run, fork, losses_of, tmp_path):
    """In mid-epoch, between two epochs, just before a validation and just after, while a process reads ahead."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    options = "--data.num_workers", 1
    run = fork("fit", "--config", write_run(whole, every=1, keep=-1, max_steps=5), *options)
    assert run.wait() == 0, run.log.read_text()
    expected = losses_of(whole)
    for name, trained in {"step=1": 2, "step=3": 5, "step=4": 7, "best": 7}.items():
        shutil.rmtree(resumed, ignore_errors=True)
        config = write_run(resumed, max_steps=5)
        run = fork("fit", "--config", config, "--ckpt_path", whole / "checkpoints" / f"{name}.ckpt", *options)
        assert run.wait() == 0, run.log.read_text()
        assert losses_of(resumed) == dict(list(expected.items())[trained:]), name
        if name != "best":  # that validation is over
            best = [torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True) for folder in (whole, resumed)]
            assert best[0]["measured"] == best[1]["measured"]


def test_an_error_in_the_middle_of_a_step_saves_what_can_be_gone_on_from(write_run, fork, losses_of, tmp_path):
    """In the batch that would step, and so in gradients that no checkpoint holds: both its batches come again."""

    def fail():
        from train.modules.drafter_training import DrafterTraining

        step = DrafterTraining.training_step

        def training_step(self, batch, batch_idx):
            if (self.current_epoch, batch_idx) == (1, 3):
                raise RuntimeError("out of memory")
            return step(self, batch, batch_idx)

        DrafterTraining.training_step = training_step

    config = write_run(tmp_path, every=1000, max_steps=6)
    run = fork("fit", "--config", config, before=fail)
    assert run.wait() == 70 and "out of memory" in run.log.read_text()
    run = fork("fit", "--config", config, "--ckpt_path", "last")
    assert run.wait() == 0, run.log.read_text()
    batches = [line.split()[0] for line in (tmp_path / "losses.txt").read_text().splitlines()]
    first, second = [f"0.{epoch}.{batch}" for epoch in (0, 1) for batch in range(5)][:8], ["0.1.2", "0.1.3", "0.1.4"]
    assert batches == [*first, *second]
    assert all(len(losses) == 1 for losses in losses_of(tmp_path).values())


def test_two_processes_go_on_exactly_too(write_run, fork, losses_of, tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    two = "--trainer.strategy", "ddp_fork", "--trainer.devices", 2
    run = fork("fit", "--config", write_run(whole, every=1, keep=-1, max_steps=4), *two)
    assert run.wait() == 0, run.log.read_text()
    config, checkpoint = write_run(resumed, max_steps=4), whole / "checkpoints" / "step=2.ckpt"
    run = fork("fit", "--config", config, "--ckpt_path", checkpoint, *two)
    assert run.wait() == 0, run.log.read_text()
    again, expected = losses_of(resumed), losses_of(whole)
    assert {batch.split(".")[0] for batch in again} == {"0", "1"} and len(expected) > len(again)
    assert again == {batch: expected[batch] for batch in again}
    assert len(set.union(*expected.values())) == len(expected), "each process draws its own anchors"


def changed(config, **data):
    values = yaml.safe_load(config.read_text(encoding="utf-8"))
    values["data"] |= data
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    return config


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ({"files": ["embedded:24:1"]}, "the training text was 20 conversations"),
        ({"max_length": 120}, "the training text was 20 conversations"),
        ({"batch_size": 5}, "data.batch_size was 4, is 5"),
        ({"seed": 7}, "data.seed was 0, is 7"),
    ],
)
def test_other_data_than_the_checkpoints_is_refused_by_name(trained, call, tmp_path, data, what):
    shutil.copy(trained.config, tmp_path / "tiny.yaml")
    config, runs = changed(tmp_path / "tiny.yaml", **data), ("--trainer.default_root_dir", tmp_path)
    refused = call(lightning_command.main, "fit", "--config", config, *runs, "--ckpt_path", trained.ckpt)
    assert what in refused.one_line_error("lightning")


def test_other_data_is_taken_where_that_is_asked_for(trained, call, tmp_path):
    shutil.copy(trained.config, tmp_path / "tiny.yaml")
    config = changed(tmp_path / "tiny.yaml", batch_size=5)
    asked = "--trainer.default_root_dir", tmp_path, "--trainer.max_steps", 9, "--resume.other_data", "true"
    assert call(lightning_command.main, "fit", "--config", config, *asked, "--ckpt_path", trained.ckpt).code == 0


def test_a_base_with_other_weights_is_refused_though_its_tokenizer_is_the_same(trained, call, make_tiny, tmp_path):
    other, runs = make_tiny("other-base", seed=5), ("--trainer.default_root_dir", tmp_path)
    refused = call(
        lightning_command.main,
        "fit",
        "--config",
        trained.config,
        *runs,
        "--model.base",
        other,
        "--ckpt_path",
        trained.ckpt,
    )
    assert "was trained on other weights than those of" in refused.one_line_error("lightning")
