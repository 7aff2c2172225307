"""A run that was killed and resumed is the very run it would have been: the same losses, bit for bit on a CPU."""

from __future__ import annotations

import hashlib
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn


class ExactResume(L.Callback):
    """Keys what is drawn at random by the batch, and refuses to go on with other data.

    Each batch seeds torch's generators by (seed, rank, epoch, batch), so no state of a generator has to be saved.
    Batches whose gradients no step has used yet come again, and a validation that was cut short is run from its start.

    Args:
        other_data: Go on although the training text or the batches differ from the checkpoint's.
    """

    def __init__(self, other_data: bool = False) -> None:
        self.other_data = other_data
        self.seed: int | None = None
        self._data: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed = state["seed"]

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.seed is None:  # else the run goes on, and with the seed it had
            self.seed = torch.initial_seed()

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        key = (self.seed, trainer.global_rank, trainer.current_epoch, batch_idx)
        torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]))

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["data"] = self._data = self._data or what_is_trained_on(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            _go_on_rightly(checkpoint["loops"]["fit_loop"], trainer)

    def on_load_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != TrainerFn.FITTING or self.other_data:
            return
        then = checkpoint.get("data") or {}
        now = self._data = what_is_trained_on(trainer)
        changes = [f"{name} was {then[name]}, is {now[name]}" for name in now if then.get(name, now[name]) != now[name]]
        if changes:
            raise ValueError(
                f"the checkpoint was trained on other data or batches ({'; '.join(changes)}): go back to them, or "
                "pass --resume.other_data true to go on all the same"
            )


def what_is_trained_on(trainer: L.Trainer) -> dict[str, Any]:
    """What decides which rows a training step sees, under the names a user knows; {} for another kind of data."""
    data = trainer.datamodule
    rows = getattr(data, "train_set", None)
    if rows is None:
        return {}
    digest = hashlib.blake2b(digest_size=8)
    for name in ("input_ids", "loss_mask"):
        for chunk in rows.data.column(name).chunks:
            digest.update(np.diff(chunk.offsets.to_numpy(zero_copy_only=False)).astype(np.int64))
            digest.update(np.ascontiguousarray(chunk.flatten().to_numpy(zero_copy_only=False)))
    names = [name for name in ("batch_size", "max_tokens", "seed") if name in data.hparams]
    return {
        "the training text": f"{len(rows)} conversations {digest.hexdigest()}",
        **{f"data.{name}": data.hparams[name] for name in names},
        "the number of devices": trainer.world_size,
        "trainer.accumulate_grad_batches": trainer.accumulate_grad_batches,
    }


def _go_on_rightly(loops: dict[str, Any], trainer: L.Trainer) -> None:
    """Correct where Lightning would go on from: after the batches whose step was taken, with the validation they owe.

    Args:
        loops: The fit loop's state in a checkpoint.
    """
    loop = trainer.fit_loop.epoch_loop
    batch, validated = loop.batch_progress.current, loop.val_loop.batch_progress
    is_between = batch.processed == batch.ready
    waiting = batch.processed % trainer.accumulate_grad_batches
    if loop._should_accumulate() if is_between else waiting:
        _take_back(loops, waiting)
    elif trainer.validating:
        if not (validated.is_last_batch and validated.current.completed == validated.current.ready):
            _validate_first(loops)
    elif trainer.training and is_between and batch.completed < batch.ready:  # in on_train_batch_end
        is_due = loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
        if is_due:
            _validate_first(loops)


def _take_back(loops: dict[str, Any], num_batches: int) -> None:
    """Let the last batches come again: their gradients were waiting for a step, and no checkpoint holds gradients."""
    trained = loops["epoch_loop.batch_progress"]
    for progress in (trained["total"], trained["current"]):
        progress |= dict.fromkeys(progress, progress["processed"] - num_batches)
    trained["is_last_batch"] = False
    for loader in loops["state_dict"].get("combined_loader", []):
        loader["batch"] -= num_batches


def _validate_first(loops: dict[str, Any]) -> None:
    """Let a validation be run from its start before training goes on.

    The state is that of a run that failed in the first batch of a validation: with any other Lightning leaves the
    validation out, or takes its first batches for done.
    """
    trained, validated = loops["epoch_loop.batch_progress"], loops["epoch_loop.val_loop.batch_progress"]
    for progress in (trained["total"], trained["current"]):
        progress["completed"] = progress["processed"]
    validated["current"] |= dict.fromkeys(validated["current"], 0)
    validated["total"] |= {"ready": 1, "started": 1, "processed": 0, "completed": 0}
