"""A run that is killed and resumed ends exactly like an uninterrupted one."""

import os
import random
import shutil
import signal
import time
from operator import attrgetter

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.demos.boring_classes import BoringModel

from train.cli import commands, lightning_command

BATCHES, BATCHES_PER_EPOCH = 50, 5  # of `write_run`
KILLS_IN_A_SAVE = [("fsync", 1), ("replace", 2), ("symlink", 1), ("remove", 1)]


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


class PrivateLoopState(L.Callback):
    """Notes which parts of Lightning's private loop state are missing that the resume callback reads."""

    def __init__(self):
        self.missing = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        names = [
            *("_should_accumulate", "_data_fetcher", "epoch_loop._should_accumulate"),
            *("epoch_loop._should_check_val_fx", "epoch_loop.val_loop.batch_progress.is_last_batch"),
            *(f"epoch_loop.batch_progress.current.{count}" for count in COUNTS),
            *(f"epoch_loop.val_loop.batch_progress.current.{count}" for count in COUNTS),
        ]
        for name in names:
            try:
                attrgetter(name)(trainer.fit_loop)
            except AttributeError:
                self.missing.append(f"trainer.fit_loop.{name}")


COUNTS = "ready", "started", "processed", "completed"
ADVICE = (
    f"Lightning {L.__version__} names its private loop state differently: adapt correct_resume_position in "
    "train/callbacks/resume.py, or pin an earlier version in pyproject.toml"
)


@pytest.mark.slow
def test_lightning_still_has_the_private_loop_state_that_an_exact_resume_edits(trained):
    loops = torch.load(trained.ckpt, weights_only=True)["loops"]["fit_loop"]
    for name in ("epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress"):
        assert loops.get(name, {}).keys() >= {"total", "current", "is_last_batch"}, ADVICE
        assert all(loops[name][part].keys() == set(COUNTS) for part in ("total", "current")), ADVICE
    loaders = loops.get("state_dict", {}).get("combined_loader", [{}])
    assert all("batch" in loader for loader in loaders), ADVICE
    callback = PrivateLoopState()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(accelerator="cpu", max_steps=1, callbacks=[callback], enable_checkpointing=False, **quiet)
    trainer.fit(BoringModel())
    assert not callback.missing, f"{callback.missing}: {ADVICE}"


@pytest.fixture(scope="module")
def uninterrupted(write_run, fork, tmp_path_factory):
    """Folder of a run without interruption."""
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
            kill_at_random(run, folder / "losses.txt", rng, latest=BATCHES * (kill + 1) // 12)
        assert run.wait() == -signal.SIGKILL, run.log.read_text()
    run = fork("fit", "--config", config, "--ckpt_path", "last")
    assert run.wait() == 0, run.log.read_text()
    return folder


@pytest.mark.slow
def test_ten_kills_at_any_moment_change_no_bit_of_the_losses_and_weights(killed, uninterrupted, assert_same_end):
    assert_same_end(killed, uninterrupted)
    assert not list((killed / "checkpoints").glob("*.new")), "temporary files of killed runs are deleted"


@pytest.mark.slow
def test_the_drafter_of_a_killed_and_resumed_run_decodes_losslessly(killed, call, tiny, tmp_path):
    assert call(commands.main, "export", killed / "checkpoints" / "last.ckpt", tmp_path / "drafter").code == 0
    verified = call(
        *(commands.main, "verify", "--base", tiny, "--drafter", f"ctc={tmp_path / 'drafter'}"),
        *("--limit", 3, "--max-new-tokens", 24),
    )
    assert verified.code == 0, verified.out
    assert "3/3" in verified.out and "Nothing is lost" in verified.out


@pytest.mark.slow
def test_resuming_from_any_checkpoint_repeats_the_uninterrupted_run(write_run, fork, losses_of, tmp_path):
    """Within an epoch, between epochs, just before and after a validation, with a process that loads ahead."""
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


@pytest.mark.slow
def test_after_an_error_within_an_accumulated_step_its_batches_are_repeated(write_run, fork, losses_of, tmp_path):
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
    run = fork("fit", "--config", config, "--ckpt_path", "last")
    assert run.wait() == 0, run.log.read_text()
    batches = [line.split()[0] for line in (tmp_path / "losses.txt").read_text().splitlines()]
    first, second = [f"0.{epoch}.{batch}" for epoch in (0, 1) for batch in range(5)][:8], ["0.1.2", "0.1.3", "0.1.4"]
    assert batches == [*first, *second]
    assert all(len(losses) == 1 for losses in losses_of(tmp_path).values())


@pytest.mark.slow
def test_a_run_with_two_processes_resumes_exactly(write_run, fork, losses_of, tmp_path):
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "what"),
    [
        ({"files": ["embedded:24:1"]}, "the training text was 20 conversations"),
        ({"max_length": 120}, "the training text was 20 conversations"),
        ({"batch_size": 5}, "data.batch_size was 4, is 5"),
        ({"seed": 7}, "data.seed was 0, is 7"),
    ],
)
def test_data_that_differ_from_the_checkpoints_are_refused_by_name(trained, call, tmp_path, data, what):
    shutil.copy(trained.config, tmp_path / "tiny.yaml")
    config, runs = changed(tmp_path / "tiny.yaml", **data), ("--trainer.default_root_dir", tmp_path)
    refused = call(lightning_command.main, "fit", "--config", config, *runs, "--ckpt_path", trained.ckpt)
    assert what in refused.one_line_error("lightning")


@pytest.mark.slow
def test_other_data_are_accepted_on_request(trained, call, tmp_path):
    text = trained.config.read_text(encoding="utf-8").replace(str(trained.config.parent), str(tmp_path))
    (tmp_path / "tiny.yaml").write_text(text, encoding="utf-8")  # its own checkpoints, not the shared ones
    config = changed(tmp_path / "tiny.yaml", batch_size=5)
    asked = "--trainer.max_steps", 9, "--resume.other_data", "true"
    assert call(lightning_command.main, "fit", "--config", config, *asked, "--ckpt_path", trained.ckpt).code == 0


@pytest.mark.slow
def test_a_base_with_other_weights_and_the_same_tokenizer_is_refused(trained, call, make_tiny, tmp_path):
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
