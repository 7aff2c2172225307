"""Signals that end a run: it saves at the end of the running step and can go on from there."""

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

EXIT_CODES = {signal.SIGTERM: 143, signal.SIGUSR1: 143, signal.SIGINT: 130}


class Preemption(L.Callback):
    """On SIGTERM, SIGUSR1 or Ctrl-C, saves ``last.ckpt`` at the end of the running step; the exit code says which.

    All processes stop at the same step, whichever of them was told. Ctrl-C once more ends the run at once. Before the
    first step signals act as ever: there is nothing to save. Under SLURM with requeueing SIGTERM and its signal are
    Lightning's, which saves and requeues.
    """

    def __init__(self) -> None:
        self._exit_code = 0
        self._asked_at = 0.0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.received_sigterm:  # while the run was being set up: Lightning noted it and went on
            raise SystemExit(EXIT_CODES[signal.SIGTERM])
        if threading.current_thread() is not threading.main_thread():
            return
        cluster = trainer._accelerator_connector.cluster_environment
        is_requeued = isinstance(cluster, SLURMEnvironment) and cluster.auto_requeue
        for number in (signal.SIGINT,) if is_requeued else EXIT_CODES:
            signal.signal(number, self._ask)  # Lightning puts back what was there when the run ends

    def _ask(self, number: int, frame: FrameType | None) -> None:
        # a launcher and the terminal may both pass on one Ctrl-C
        if number == signal.SIGINT and self._exit_code and time.monotonic() - self._asked_at > 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self._exit_code:
            self._exit_code, self._asked_at = EXIT_CODES[signal.Signals(number)], time.monotonic()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.fit_loop._should_accumulate():  # gradients of half a step are not in a checkpoint
            self._stop_if_asked(trainer)

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._stop_if_asked(trainer)

    def _stop_if_asked(self, trainer: L.Trainer) -> None:
        if not trainer.strategy.reduce_boolean_decision(bool(self._exit_code), all=False):
            return
        savers = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
        for callback in savers:
            callback.save_on_exception = False  # the exit below is one, and what it would save is saved here
        if savers:
            path = Path(next((saver for saver in savers if saver.save_last), savers[0]).dirpath) / "last.ckpt"
            trainer.save_checkpoint(path)
            if trainer.is_global_zero:
                message = f"stopped by a signal after step {trainer.global_step}: go on with --ckpt_path last"
                print(f"\n{message}", file=sys.stderr)
        # Lightning kills all processes where one that it started ends otherwise than with 0
        is_launched = trainer.global_rank and not trainer.strategy.cluster_environment.creates_processes_externally
        raise SystemExit(0 if is_launched else self._exit_code or EXIT_CODES[signal.SIGTERM])
