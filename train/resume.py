"""Stopping and going on: signals save a checkpoint, and a resumed run equals an uninterrupted one."""

import hashlib
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from train.optimizer import is_accumulating

EXIT_CODES = {signal.SIGTERM: 143, signal.SIGUSR1: 143, signal.SIGINT: 130}


def savers(trainer: L.Trainer) -> list[ModelCheckpoint]:
    """The callbacks that save checkpoints, first the one that keeps ``last.ckpt``, if there is one."""
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    return sorted(callbacks, key=lambda saver: not saver.save_last)


def save_last(trainer: L.Trainer) -> bool:
    """Save ``last.ckpt``, where the run keeps checkpoints at all; whether it does."""
    for saver in savers(trainer)[:1]:
        assert saver.dirpath is not None, "Lightning chooses the folder before the first step"
        path = Path(saver.dirpath) / "last.ckpt"
        if trainer.is_global_zero and path.is_symlink():  # DeepSpeed would write into the checkpoint behind the link
            path.unlink()
        if trainer.is_global_zero and (path / "latest").is_file():  # its sign of a folder that is complete
            (path / "latest").unlink()
        trainer.strategy.barrier()
        trainer.save_checkpoint(path, weights_only=False)
    return bool(savers(trainer))


class Preemption(L.Callback):
    """On SIGTERM, SIGUSR1 or Ctrl-C, saves ``last.ckpt`` at the end of the running step and exits.

    The exit code is 143 for the signals and 130 for Ctrl-C. All processes stop at the same step, whichever of them
    received the signal. A second Ctrl-C ends the run at once. Before the first step, there is nothing to save and
    signals have their usual effect. Under SLURM with requeueing, Lightning handles SIGTERM and SLURM's signal itself:
    it saves and requeues.

    An error in one of several processes saves nothing: that would wait for the others, which wait for this one.
    """

    def __init__(self) -> None:
        self._exit_code = 0
        self._signal_time = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.received_sigterm:  # during the set-up: Lightning only notes the signal
            raise SystemExit(EXIT_CODES[signal.SIGTERM])
        if threading.current_thread() is not threading.main_thread():
            return
        is_requeued = signal.getsignal(signal.SIGUSR1) not in (signal.SIG_DFL, signal.SIG_IGN)  # Lightning's handler
        for number in (signal.SIGINT,) if is_requeued else EXIT_CODES:
            signal.signal(number, self._handle)  # Lightning restores the previous handlers when the run ends

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A launcher and the terminal may both pass on the same Ctrl-C, so a second one counts after a second only.
        if number == signal.SIGINT and self._exit_code and time.monotonic() - self._signal_time > 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self._exit_code:
            self._exit_code, self._signal_time = EXIT_CODES[signal.Signals(number)], time.monotonic()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if not is_accumulating(trainer):  # a checkpoint does not hold the gradients of half a step
            self._stop_if_requested(trainer)

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._stop_if_requested(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if trainer.world_size > 1:
            for callback in savers(trainer):
                callback.save_on_exception = False
            if isinstance(exception, Exception) and (launcher := trainer.strategy.launcher) is not None:
                launcher.kill(signal.SIGKILL)  # the processes that this one has launched; Lightning leaves them waiting

    def _stop_if_requested(self, trainer: L.Trainer) -> None:
        strategy = trainer.strategy
        if not strategy.reduce_boolean_decision(bool(self._exit_code), all=False):
            return
        for callback in savers(trainer):
            callback.save_on_exception = False  # the SystemExit below would make it save once more
        if save_last(trainer) and trainer.is_global_zero:
            message = f"stopped by a signal after step {trainer.global_step}: go on with --ckpt_path last"
            print(f"\n{message}", file=sys.stderr)
        # Lightning kills all processes as soon as one of those it has launched exits with another code than 0.
        environment: Any = getattr(strategy, "cluster_environment", None)
        is_launched = trainer.global_rank > 0 and not environment.creates_processes_externally
        raise SystemExit(0 if is_launched else self._exit_code or EXIT_CODES[signal.SIGTERM])


class ExactResume(L.Callback):
    """Makes a resumed run equal to an uninterrupted one, bit for bit on a CPU, and refuses to go on with other data.

    Torch's generators are seeded by (seed, rank, epoch, batch) before each batch, so their state need not be saved.
    Batches whose gradients no optimizer step has used are repeated, and an interrupted validation starts again.

    Args:
        other_data: Continue even if the training text or the batches differ from those of the checkpoint.
    """

    def __init__(self, other_data: bool = False) -> None:
        self.other_data = other_data
        self.seed: int | None = None
        self._steps_before: int | None = None  # steps in an epoch when the checkpoint was saved
        self._data: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed = state["seed"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.seed is None:  # a resumed run has the seed of its checkpoint
            self.seed = torch.initial_seed()
        if self._steps_before and trainer.max_steps == -1:  # the learning rate ends with the epochs
            for config in trainer.lr_scheduler_configs:
                done: Any = config.scheduler
                done.last_epoch = round(done.last_epoch * steps_per_epoch(trainer) / self._steps_before)

    def on_train_batch_start(self, trainer: L.Trainer, _: Any, batch: Any, batch_idx: int) -> None:
        assert self.seed is not None, "on_train_start has set the seed"
        key = self.seed, trainer.global_rank, trainer.current_epoch, batch_idx
        torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Lightning saves the last step only where it is one of every n, or validation follows it.
        if any(saver.save_last and not saver._should_skip_saving_checkpoint(trainer) for saver in savers(trainer)[:1]):
            save_last(trainer)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["data"] = self._data = self._data or describe_data(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            checkpoint["steps_per_epoch"] = steps_per_epoch(trainer)
            correct_resume_position(checkpoint["loops"]["fit_loop"], trainer)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._steps_before = checkpoint.get("steps_per_epoch")
        if trainer.state.fn != TrainerFn.FITTING or self.other_data:
            return
        before, self._data = checkpoint["data"], describe_data(trainer)
        changed = {name: value for name, value in self._data.items() if before.get(name) != value}
        if changes := [f"{name} was {before.get(name)}, is {value}" for name, value in changed.items()]:
            raise ValueError(
                f"the checkpoint was trained on other data or batches ({'; '.join(changes)}): go back to them, or "
                "pass --resume.other_data true to go on all the same"
            )


def steps_per_epoch(trainer: L.Trainer) -> int:
    """How many optimizer steps an epoch has."""
    return math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)


def describe_data(trainer: L.Trainer) -> dict[str, Any]:
    """Return everything that decides which rows a training step reads; nothing for data modules that are not ours."""
    data: Any = getattr(trainer, "datamodule", None)
    rows = getattr(data, "train_set", None)
    if rows is None:
        return {}
    digest = hashlib.blake2b(digest_size=8)
    for name in ("input_ids", "loss_mask"):
        for chunk in rows.data.column(name).chunks:
            row_lengths = np.diff(chunk.offsets.to_numpy(zero_copy_only=False)).astype(np.int64)
            digest.update(row_lengths.tobytes())
            digest.update(chunk.flatten().to_numpy(zero_copy_only=False).tobytes())
    return {
        "the training text": f"{len(rows)} conversations {digest.hexdigest()}",
        **{f"data.{name}": data.hparams[name] for name in ("batch_size", "max_tokens", "seed")},
        "the number of devices": trainer.world_size,
        "trainer.accumulate_grad_batches": trainer.accumulate_grad_batches,
    }


# What follows reads and edits Lightning's private loop state, which has no public counterpart. Lightning resumes
# after the last batch that was read, which loses accumulated gradients and skips a validation that was interrupted.
# tests/train/test_resume.py fails if a new version of Lightning names this state differently.


def correct_resume_position(loops: dict[str, Any], trainer: L.Trainer) -> None:
    """Make Lightning resume after the last batch that an optimizer step has used, with the validation that is due.

    ``loops``, the state of the fit loop in a checkpoint that the trainer saves, is edited in place.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    batch, validated = loop.batch_progress.current, loop.val_loop.batch_progress
    is_between_batches = batch.processed == batch.ready
    num_waiting = batch.processed % trainer.accumulate_grad_batches
    is_validated = validated.is_last_batch and validated.current.completed == validated.current.ready
    in_batch_end = trainer.training and is_between_batches and batch.completed < batch.ready  # on_train_batch_end
    if loop._should_accumulate() if is_between_batches else num_waiting:
        _repeat_batches(loops, num_waiting)
    elif (trainer.validating and not is_validated) or (
        in_batch_end and loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
    ):
        _start_with_validation(loops)


def _repeat_batches(loops: dict[str, Any], num_batches: int) -> None:
    """Repeat the last batches, whose gradients were waiting for a step: no checkpoint holds gradients."""
    trained = loops["epoch_loop.batch_progress"]
    for progress in (trained["total"], trained["current"]):
        progress |= dict.fromkeys(progress, progress["processed"] - num_batches)
    trained["is_last_batch"] = False
    for loader in loops["state_dict"].get("combined_loader", []):
        loader["batch"] -= num_batches


def _start_with_validation(loops: dict[str, Any]) -> None:
    """Run a complete validation before training continues.

    The state is that of a run that failed in the first batch of a validation. With any other state, Lightning skips
    the validation or takes its first batches for done.
    """
    trained, validated = loops["epoch_loop.batch_progress"], loops["epoch_loop.val_loop.batch_progress"]
    for progress in (trained["total"], trained["current"]):
        progress["completed"] = progress["processed"]
    validated["current"] |= dict.fromkeys(validated["current"], 0)
    validated["total"] |= {"ready": 1, "started": 1, "processed": 0, "completed": 0}
