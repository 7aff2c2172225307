"""DrafterTraining: one LightningModule that trains every learned drafter on a frozen base."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor

from drafters.protocol import BaseShape, LearnedDrafter, TrainingBatch
from inference.base import Base, Dtype, load_base, shape_of, tokenizer_hash
from train.answers import Answers, with_own_answers
from train.look import choose_layers, look, recall
from train.metrics import AcceptanceLength, DepthAcceptance
from train.optimizer import Schedule, adamw
from train.simulate import answer_spans, simulate

DEPTHS = 8


class DrafterTraining(L.LightningModule):
    """Train a learned drafter on the hidden states and distilled labels of a frozen base.

    The base runs in process and stays outside the checkpoint. Labels are its argmax at every position of the text
    (CTC-drafter, equations 3 to 5). Validation simulates decoding and logs the acceptance length.

    Args:
        base: Folder or hub id of the frozen base.
        drafter: The drafter to train: class_path and init_args.
        base_dtype: Number format the base runs in.
        learning_rate: Peak learning rate of AdamW; the paper's is 3e-5.
        weight_decay: Of matrices.
        warmup_steps: Steps of linear warm-up.
        schedule: ``constant`` after the warm-up, or a ``cosine`` to zero at the last step.
        val_answers: What validation decodes: the base's own ``greedy`` answers to the held-out prompts, which makes
            the simulation exact, or the held-out ``text`` as it is, which needs no generation.
        max_val_tokens: Longest answer the base gives in validation.
    """

    def __init__(
        self,
        base: str,
        drafter: Callable[[BaseShape], LearnedDrafter],
        base_dtype: Dtype = "float32",
        learning_rate: float = 3e-5,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        schedule: Schedule = "constant",
        val_answers: Answers = "greedy",
        max_val_tokens: int = 128,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.warmup_steps, self.schedule = warmup_steps, schedule
        self.val_answers, self.max_val_tokens = val_answers, max_val_tokens
        with torch.random.fork_rng(devices=[]):  # loading weights must not move the generator that shuffles and samples
            self.__dict__["base"] = load_base(base, base_dtype)
        self.drafter = drafter(self.base.shape)
        self.drafter.initialise(self.base.borrowed)  # a checkpoint that is resumed or validated is loaded over it
        self.acceptance_length, self.depth_acceptance = AcceptanceLength(), DepthAcceptance(DEPTHS)
        self._own_answers: dict[int, dict[str, Tensor]] = {}

    base: Base
    command: str | None = None  # the command line that trains, for the model card
    measured: dict[str, float] | None = None  # acceptance length of the last validation, and its step

    def setup(self, stage: str) -> None:
        self.base.model.to(self.trainer.strategy.root_device)  # the strategy moves this module only after setup
        read_with = getattr(self.trainer.datamodule, "tokenizer_object", None)
        if read_with is not None and tokenizer_hash(read_with) != tokenizer_hash(self.base.tokenizer):
            raise ValueError(
                f"the tokenizer of the data ({self.trainer.datamodule.hparams.tokenizer}) is not that of the base "
                f"{self.base.name}: leave --data.tokenizer away"
            )
        longest = getattr(getattr(self.trainer.datamodule, "hparams", None), "max_length", 0)
        if longest > self.base.context_length:
            raise ValueError(
                f"data.max_length is {longest}, but the context of {self.base.name} ends at "
                f"{self.base.context_length}: pass --data.max_length {self.base.context_length} or less"
            )
        if store := getattr(self.trainer.datamodule, "store", None):
            choose_layers(store, self.base, self.drafter.needs.hidden_layers)

    def look(self, input_ids: Tensor, loss_mask: Tensor) -> TrainingBatch:
        """What the base says about texts (B, S)."""
        hidden, last, labels = look(self.base, self.drafter.needs.hidden_layers, input_ids)
        return TrainingBatch(hidden, last, input_ids, labels, loss_mask)

    def seen(self, batch: dict[str, Tensor]) -> TrainingBatch:
        """What the base says about a batch: read from it where it comes from a feature store."""
        if "hidden" in batch:
            return recall(batch, self.drafter.needs.hidden_layers, self.base.model.dtype)
        return self.look(batch["input_ids"], batch["loss_mask"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss, seen = self.drafter.loss(self.seen(batch), self.base.borrowed)
        self.log("train/loss", loss, prog_bar=True)
        self.log_dict({f"train/{name}": value for name, value in seen.items()})
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        if self.val_answers == "greedy":
            if batch_idx not in self._own_answers:
                self._own_answers[batch_idx] = with_own_answers(self.base, batch, self.max_val_tokens)
            batch = {name: value.to(self.device) for name, value in self._own_answers[batch_idx].items()}
        seen = self.look(batch["input_ids"], batch["loss_mask"])
        loss, _ = self.drafter.loss(seen, self.base.borrowed)
        self.log("val/loss", loss, batch_size=len(seen.labels), sync_dist=True)
        for states, tokens, mask in zip(seen.hidden, seen.input_ids, seen.loss_mask.tolist(), strict=True):
            for span in answer_spans(mask):
                emitted = simulate(self.drafter, states, tokens, span, self.base.borrowed, self.base.eos)
                self.acceptance_length.update(emitted)
                self.depth_acceptance.update([count - 1 for count in emitted])

    def on_validation_epoch_end(self) -> None:
        length = self.acceptance_length.compute()
        if not self.trainer.sanity_checking:
            self.measured = {"step": self.global_step, "acceptance_length": float(length)}
        self.log("val/acceptance_length", length, prog_bar=True)
        for depth, share in enumerate(self.depth_acceptance.compute().tolist(), start=1):
            self.log(f"val/accepted_{depth}_or_more", share)
        self.acceptance_length.reset()
        self.depth_acceptance.reset()

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        self.on_validation_epoch_end()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["base"] = {
            "shape": vars(shape_of(self.base.model.config)),
            "name": self.base.name,
            "tokenizer_hash": tokenizer_hash(self.base.tokenizer),
        }
        checkpoint["measured"] = self.measured
        checkpoint["command"] = self.command

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.measured = checkpoint["measured"]
        if checkpoint["base"]["tokenizer_hash"] != tokenizer_hash(self.base.tokenizer):
            raise ValueError(f"the checkpoint was trained for {checkpoint['base']['name']}, not for {self.base.name}")
        ours, theirs = (
            {n: w.shape for n, w in state.items()} for state in (self.state_dict(), checkpoint["state_dict"])
        )
        if differing := sorted(dict(ours.items() ^ theirs.items())):
            raise ValueError(
                f"the checkpoint holds another drafter than the config ({differing[0]} differs): "
                "pass the config it was trained with"
            )

    def configure_optimizers(self):
        return adamw(self, self.learning_rate, self.weight_decay, self.warmup_steps, self.schedule)
