"""Makes a resumed run equal to an uninterrupted one: the same losses, bit for bit on a CPU."""

from __future__ import annotations

import hashlib
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn


class ExactResume(L.Callback):
    """Seeds the random numbers of each batch, and refuses to continue a checkpoint with other data.

    Torch's generators are seeded by (seed, rank, epoch, batch) before each batch, so their state need not be saved.
    Batches whose gradients no optimizer step has used are repeated, and an interrupted validation starts again.

    Args:
        other_data: Continue even if the training text or the batches differ from those of the checkpoint.
    """

    def __init__(self, other_data: bool = False) -> None:
        self.other_data = other_data
        self.seed: int | None = None
        self._data: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed = state["seed"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.seed is None:  # a resumed run has the seed of its checkpoint
            self.seed = torch.initial_seed()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert self.seed is not None, "on_train_start has set the seed"
        key = self.seed, trainer.global_rank, trainer.current_epoch, batch_idx
        torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]))

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["data"] = self._data = self._data or describe_data(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            correct_resume_position(checkpoint["loops"]["fit_loop"], trainer)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != TrainerFn.FITTING or self.other_data:
            return
        before = checkpoint.get("data") or {}
        now = self._data = describe_data(trainer)
        changes = [
            f"{name} was {before[name]}, is {now[name]}" for name in now if before.get(name, now[name]) != now[name]
        ]
        if changes:
            raise ValueError(
                f"the checkpoint was trained on other data or batches ({'; '.join(changes)}): go back to them, or "
                "pass --resume.other_data true to go on all the same"
            )


def describe_data(trainer: L.Trainer) -> dict[str, Any]:
    """Return everything that decides which rows a training step reads, under names that a user knows.

    The result is empty for data modules that are not ours.
    """
    data: Any = getattr(trainer, "datamodule", None)
    rows = getattr(data, "train_set", None)
    if rows is None:
        return {}
    digest = hashlib.blake2b(digest_size=8)
    for name in ("input_ids", "loss_mask"):
        for chunk in rows.data.column(name).chunks:
            row_lengths = np.diff(chunk.offsets.to_numpy(zero_copy_only=False)).astype(np.int64)
            values = chunk.flatten().to_numpy(zero_copy_only=False)
            digest.update(row_lengths.tobytes())
            digest.update(values.tobytes())
    names = [name for name in ("batch_size", "max_tokens", "seed") if name in data.hparams]
    return {
        "the training text": f"{len(rows)} conversations {digest.hexdigest()}",
        **{f"data.{name}": data.hparams[name] for name in names},
        "the number of devices": trainer.world_size,
        "trainer.accumulate_grad_batches": trainer.accumulate_grad_batches,
    }


# What follows reads and edits Lightning's private loop state, which has no public counterpart. Lightning resumes
# after the last batch that was read, which loses accumulated gradients and skips a validation that was interrupted.
# tests/train/callbacks/test_resume.py fails if a new version of Lightning names this state differently.


def correct_resume_position(loops: dict[str, Any], trainer: L.Trainer) -> None:
    """Make Lightning resume after the last batch that an optimizer step has used, with the validation that is due.

    Args:
        loops: State of the fit loop in a checkpoint, edited in place.
        trainer: The trainer that saves the checkpoint.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    batch, validated = loop.batch_progress.current, loop.val_loop.batch_progress
    is_between_batches = batch.processed == batch.ready
    num_waiting = batch.processed % trainer.accumulate_grad_batches
    if loop._should_accumulate() if is_between_batches else num_waiting:
        _repeat_batches(loops, num_waiting)
    elif trainer.validating:
        if not (validated.is_last_batch and validated.current.completed == validated.current.ready):
            _start_with_validation(loops)
    elif trainer.training and is_between_batches and batch.completed < batch.ready:  # in on_train_batch_end
        is_due = loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
        if is_due:
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
