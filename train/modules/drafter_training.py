"""DrafterTraining: one LightningModule that trains every learned drafter on a frozen base."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from drafters.protocol import BaseShape, LearnedDrafter, TrainingBatch
from inference.engine.base import Base, Dtype, base_hash, load_base, shape_of, tokenizer_hash
from train.feature_store.base_features import choose_layers, extract_features, stored_features
from train.modules.divisor import SharedDivisor
from train.modules.metrics import AcceptanceLength, DepthAcceptance, conditional
from train.modules.optimizer import Schedule, adamw
from train.modules.strategies import FSDP2, is_deepspeed, recompute
from train.validation.base_answers import Answers, with_own_answers
from train.validation.simulate import answer_spans, simulate

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
        activation_checkpointing: Keep only the inputs of the drafter's trunk layers, and compute the rest again in the
            backward pass: less memory, more time.
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
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        rates = {"learning_rate": learning_rate, "weight_decay": weight_decay, "warmup_steps": warmup_steps}
        if wrong := [f"{name} must be at least 0, not {value}" for name, value in rates.items() if not value >= 0]:
            raise ValueError(wrong[0])
        self.save_hyperparameters()
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.warmup_steps, self.schedule = warmup_steps, schedule
        self.val_answers, self.max_val_tokens = val_answers, max_val_tokens
        with torch.random.fork_rng(devices=[]):  # loading weights must not move the generator that shuffles and samples
            self.__dict__["base"] = load_base(base, base_dtype)
        self.drafter = drafter(self.base.shape)
        self.drafter.initialise(self.base.base_weights)  # a checkpoint that is resumed or validated is loaded over it
        if activation_checkpointing:
            recompute(self.drafter)
        self.acceptance_length, self.depth_acceptance = AcceptanceLength(), DepthAcceptance(DEPTHS)
        self._own_answers: dict[int, dict[str, Tensor]] = {}
        self._base_hash = ""  # found out at the first checkpoint

    base: Base
    command: str | None = None  # the command line that trains, for the model card
    measured: dict[str, float] | None = None  # acceptance length of the last validation, and its step

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, FSDP2):
            self.trainer.strategy.shard(self.drafter)

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
            choose_layers(store, self.base, self.drafter.required_outputs.hidden_layers)

    def extract_features(self, input_ids: Tensor, loss_mask: Tensor, step: int = 0) -> TrainingBatch:
        """What the base says about texts (B, S)."""
        hidden, last, labels = extract_features(self.base, self.drafter.required_outputs.hidden_layers, input_ids)
        return TrainingBatch(hidden, last, input_ids, labels, loss_mask, step)

    def seen(self, batch: dict[str, Tensor]) -> TrainingBatch:
        """What the base says about a batch: read from it where it comes from a feature store."""
        if "hidden" in batch:
            return stored_features(
                batch, self.drafter.required_outputs.hidden_layers, self.base.model.dtype, self.global_step
            )
        return self.extract_features(batch["input_ids"], batch["loss_mask"], self.global_step)

    def on_fit_start(self) -> None:
        self.divisor = SharedDivisor(partial(self.trainer.strategy.reduce, reduce_op="sum"), self.trainer.world_size)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.divisor.begin()
        batch = self.seen(batch).with_divisor(self.divisor)
        loss, seen = self.drafter.loss(batch, self.base.base_weights)
        self.log("train/loss", loss, prog_bar=True, sync_dist=True)
        self.log_dict({f"train/{name}": value for name, value in seen.items()}, sync_dist=True)
        return self.divisor.weighed(loss) if self._weighs_batches else loss

    @property
    def _weighs_batches(self) -> bool:
        return self.trainer.accumulate_grad_batches > 1 and not is_deepspeed(self.trainer)  # it keeps its gradients

    def on_after_backward(self) -> None:
        if self._weighs_batches and not self.trainer.fit_loop._should_accumulate():
            self.divisor.correct(self.drafter.parameters(), self.trainer.accumulate_grad_batches)

    def answered(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """The texts that validation decodes: a held-out batch, or the base's own answers to its prompts."""
        if self.val_answers == "text":
            return batch
        if batch_idx not in self._own_answers:
            self._own_answers[batch_idx] = with_own_answers(self.base, batch, self.max_val_tokens)
        return {name: value.to(self.device) for name, value in self._own_answers[batch_idx].items()}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        batch = self.answered(batch, batch_idx)
        seen = self.extract_features(batch["input_ids"], batch["loss_mask"])
        loss, _ = self.drafter.loss(seen, self.base.base_weights)
        self.log("val/loss", loss, batch_size=len(seen.labels), sync_dist=True)
        for states, tokens, mask in zip(seen.hidden, seen.input_ids, seen.loss_mask.tolist(), strict=True):
            for span in answer_spans(mask):
                emitted = simulate(self.drafter, states, tokens, span, self.base.base_weights, self.base.eos)
                self.acceptance_length.update(emitted)
                self.depth_acceptance.update([count - 1 for count in emitted])

    def on_validation_epoch_end(self) -> None:
        length = self.acceptance_length.compute()
        if not self.trainer.sanity_checking:
            self.measured = {"step": self.global_step, "acceptance_length": float(length)}
        # metrics are the same on all processes: to say so keeps Lightning from warning of each
        self.log("val/acceptance_length", length, prog_bar=True, sync_dist=True)
        shares, by_depth = self.depth_acceptance.compute().tolist(), {}
        for depth, (share, given) in enumerate(zip(shares, conditional(shares), strict=True), start=1):
            by_depth |= {f"val/accepted_{depth}_or_more": share, f"val/accepted_{depth}_given_{depth - 1}": given}
        self.log_dict(by_depth, sync_dist=True)
        self.acceptance_length.reset()
        self.depth_acceptance.reset()

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        self.on_validation_epoch_end()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._base_hash = self._base_hash or base_hash(self.base)
        checkpoint["base"] = {
            "shape": vars(shape_of(self.base.model.config)),
            "name": self.base.name,
            "tokenizer_hash": tokenizer_hash(self.base.tokenizer),
            "weights_hash": self._base_hash,
        }
        checkpoint["measured"] = self.measured
        checkpoint["command"] = self.command

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.measured = checkpoint["measured"]
        if checkpoint["base"]["tokenizer_hash"] != tokenizer_hash(self.base.tokenizer):
            raise ValueError(f"the checkpoint was trained for {checkpoint['base']['name']}, not for {self.base.name}")
        is_fitting = self.trainer.state.fn == TrainerFn.FITTING
        if is_fitting and checkpoint["base"].get("weights_hash", base_hash(self.base)) != base_hash(self.base):
            raise ValueError(
                f"the checkpoint was trained on other weights than those of {self.base.name}: give model.base and "
                "model.base_dtype as they were"
            )
        weights = checkpoint.get("state_dict", self.state_dict())  # a strategy that shards has loaded them already
        ours, theirs = ({n: w.shape for n, w in state.items()} for state in (self.state_dict(), weights))
        if differing := sorted(dict(ours.items() ^ theirs.items())):
            raise ValueError(
                f"the checkpoint holds another drafter than the config ({differing[0]} differs): "
                "pass the config it was trained with"
            )

    def configure_optimizers(self):
        return adamw(self, self.learning_rate, self.weight_decay, self.warmup_steps, self.schedule)
