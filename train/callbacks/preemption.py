"""Signals that stop a run: it saves a checkpoint at the end of the running step, and can continue from there."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn

from train.optimizer import is_accumulating

EXIT_CODES = {signal.SIGTERM: 143, signal.SIGUSR1: 143, signal.SIGINT: 130}


class Preemption(L.Callback):
    """On SIGTERM, SIGUSR1 or Ctrl-C, saves ``last.ckpt`` at the end of the running step and exits.

    The exit code is 143 for the signals and 130 for Ctrl-C. All processes stop at the same step, whichever of them
    received the signal. A second Ctrl-C ends the run at once. Before the first step, there is nothing to save and
    signals have their usual effect. Under SLURM with requeueing, Lightning handles SIGTERM and SLURM's signal itself:
    it saves and requeues.
    """

    def __init__(self) -> None:
        self._exit_code = 0
        self._signal_time = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.received_sigterm:  # during the set-up: Lightning only notes the signal
            raise SystemExit(EXIT_CODES[signal.SIGTERM])
        if threading.current_thread() is not threading.main_thread():
            return
        cluster = trainer._accelerator_connector.cluster_environment
        is_requeued = isinstance(cluster, SLURMEnvironment) and cluster.auto_requeue
        for number in (signal.SIGINT,) if is_requeued else EXIT_CODES:
            signal.signal(number, self._handle)  # Lightning restores the previous handlers when the run ends

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A launcher and the terminal may both pass on the same Ctrl-C, so a second one counts after a second only.
        if number == signal.SIGINT and self._exit_code and time.monotonic() - self._signal_time > 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self._exit_code:
            self._exit_code, self._signal_time = EXIT_CODES[signal.Signals(number)], time.monotonic()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not is_accumulating(trainer):  # a checkpoint does not hold the gradients of half a step
            self._stop_if_requested(trainer)

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._stop_if_requested(trainer)

    def _stop_if_requested(self, trainer: L.Trainer) -> None:
        strategy = trainer.strategy
        if not strategy.reduce_boolean_decision(bool(self._exit_code), all=False):
            return
        savers = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
        for callback in savers:
            callback.save_on_exception = False  # the SystemExit below would make it save once more
        if savers:
            folder = next((saver for saver in savers if saver.save_last), savers[0]).dirpath
            assert folder is not None, "Lightning chooses the folder before the first step"
            trainer.save_checkpoint(Path(folder) / "last.ckpt", weights_only=False)
            if trainer.is_global_zero:
                message = f"stopped by a signal after step {trainer.global_step}: go on with --ckpt_path last"
                print(f"\n{message}", file=sys.stderr)
        # Lightning kills all processes as soon as one of those it has launched exits with another code than 0.
        environment: Any = getattr(strategy, "cluster_environment", None)
        is_launched = trainer.global_rank > 0 and not environment.creates_processes_externally
        raise SystemExit(0 if is_launched else self._exit_code or EXIT_CODES[signal.SIGTERM])
