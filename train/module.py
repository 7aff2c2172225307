"""DrafterTraining: the LightningModule that trains every learned drafter on a frozen base."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor

from data.dtypes import Dtype
from data.rows import check_tokens
from data.tokenizer import tokenizer_hash
from drafters.checkpoint import DrafterConfig
from drafters.checks import check_at_least
from drafters.protocol import BaseShape, LearnedDrafter, TrainingBatch
from inference.bases import QUANTIZED_DTYPES
from inference.verifier.base import Base, base_hash, changed_logits, load_base, prepare_process
from train.checkpoints import WHOLE_WEIGHTS
from train.divisor import SharedDivisor
from train.features import choose_layers, compute_features, read_features
from train.initial_drafter import choose_draft_tokens, load_initial
from train.optimizer import OPTIMIZERS, OptimizerName, Schedule, is_accumulating, with_schedule
from train.strategies import (
    FSDP2,
    enable_activation_checkpointing,
    gathered_weights,
    gathers_in_forwards,
    is_deepspeed,
    shard_layers,
    whole_weights,
)
from train.validation import Acceptance, Answers, simulate_answers, with_own_answers


class DrafterTraining(L.LightningModule):
    """Train a learned drafter on the hidden states and distilled labels of a frozen base.

    The base runs in the same process and is not part of the checkpoint. The labels are its most probable token at
    every position of the text (CTC-drafter, equations 3 to 5). Validation simulates decoding and logs the acceptance
    length.

    Args:
        base: Folder or hub id of the frozen base, also with ``@REVISION``, a commit, tag or branch of the hub, or a
            GGUF file.
        drafter: The drafter to train: class_path and init_args.
        initial_drafter: Folder of an exported or imported drafter, or ``OWNER/NAME@REVISION`` on the hub, whose weights
            the training starts from; by default from fresh ones. `drafter` must describe the same drafter, but its
            ``loss`` and ``draft`` may differ.
        base_dtype: Dtype that the base runs in.
        optimizer: ``adamw``, or ``muon`` for the weights of linear layers and AdamW for the others.
        learning_rate: Peak learning rate; the CTC-drafter paper uses 3e-5.
        weight_decay: Weight decay of matrices; other parameters have none.
        warmup_steps: Steps of linear warm-up of the learning rate.
        schedule: Learning rate after the warm-up: ``constant``, or a ``linear`` or ``cosine`` decay to zero at the last
            step.
        val_answers: Text that validation decodes: the base's own ``greedy`` answers to the held-out prompts, which
            makes the simulation exact, or the held-out ``text`` itself, which needs no generation.
        max_val_tokens: Maximum number of tokens of an answer that the base generates for validation, at most half of
            its context. Prompts that leave less room are left out.
        activation_checkpointing: Keep only the inputs of the drafter's trunk layers and compute the rest again in the
            backward pass, which takes less memory and more time.
        shard_base: Shard the weights of the base's layers over the devices, for a base that does not fit on one; see
            ``strategy/sharded_base.yaml``.
    """

    base: Base
    drafter: LearnedDrafter
    divisor: SharedDivisor
    shape: BaseShape  # the sizes that the drafter was built from
    measured: dict[str, float] | None = None  # step and acceptance length of the last validation

    def __init__(
        self,
        base: str,
        drafter: Callable[[BaseShape], LearnedDrafter],
        initial_drafter: str | None = None,
        base_dtype: Dtype = "float32",
        optimizer: OptimizerName = "adamw",
        learning_rate: float = 3e-5,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        schedule: Schedule = "constant",
        val_answers: Answers = "greedy",
        max_val_tokens: int = 128,
        activation_checkpointing: bool = False,
        shard_base: bool = False,
    ) -> None:
        super().__init__()
        if shard_base and base_dtype in QUANTIZED_DTYPES:
            raise ValueError(f"a base in {base_dtype} cannot be sharded: take bfloat16, or leave shard_base off")
        check_at_least(0, learning_rate=learning_rate, weight_decay=weight_decay, warmup_steps=warmup_steps)
        self.save_hyperparameters()
        self.val_answers, self.max_val_tokens, self.shard_base = val_answers, max_val_tokens, shard_base
        # Loading the weights must not move the random generator that shuffles and samples.
        with torch.random.fork_rng(devices=[]):
            # An ordinary attribute would put the base into the module's parameters and checkpoints.
            # It multiplies on AMX, where there is one, so its rows are not bit-identical.
            self.__dict__["base"] = load_base(base, base_dtype, bitwise=False, movable=True)
        # When resuming or validating, a checkpoint replaces these weights.
        self.initial_drafter = initial_drafter
        if initial_drafter:
            node = self.hparams.get("drafter")
            self.drafter, self.shape = load_initial(initial_drafter, drafter, node, self.base)
        else:
            self.shape = self.base.shape
            self.drafter = drafter(self.shape)
            self.drafter.initialise(self.base.base_weights)
        if self.drafter.distillation and (changed := changed_logits(self.base.model)):
            raise ValueError(
                f"{type(self.drafter).__name__} learns whole distributions, and {self.base.name} changes its logits "
                f"({changed}): train ctc or block, or Medusa or Hydra without distillation"
            )
        if activation_checkpointing:
            enable_activation_checkpointing(self.drafter)
        self.acceptance = Acceptance()
        self._generated_batches: dict[int, dict[str, Tensor]] = {}
        self._base_hash = ""

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, FSDP2):
            self.trainer.strategy.shard(self.drafter)

    def setup(self, stage: str) -> None:
        data: Any = getattr(self.trainer, "datamodule", None)
        tokenizer = getattr(data, "tokenizer_object", None)
        if tokenizer is not None and tokenizer_hash(tokenizer) != tokenizer_hash(self.base.tokenizer):
            raise ValueError(
                f"the tokenizer of the data ({data.hparams.tokenizer}) is not that of the base "
                f"{self.base.name}: leave out --data.tokenizer"
            )
        self.base.check_length(getattr(getattr(data, "hparams", None), "max_length", 0), "data.max_length")
        for name in ("train_set", "val_set"):
            check_tokens(getattr(data, name, None), self.base.tokenizer, self.base.config.vocab_size)
        if store := getattr(data, "store", None):
            choose_layers(store, self.base, self.base_hash(), self.drafter.required_outputs.hidden_layers)
            if self.runs_base(self.trainer):
                needed = "--model.val_answers text and a store with the held-out conversations"
                rank_zero_info(f"validation runs the base, which is kept whole; it need not with {needed}")
                data.val_places = None
        if stage == "fit":  # a checkpoint brings its own after this
            rows = getattr(data, "train_set", None)
            choose_draft_tokens(self.drafter, self.base, rows, is_initial=bool(self.initial_drafter))
        decoder: Any = self.base.model.base_model
        if not self.runs_base(self.trainer):
            if getattr(decoder, "layers", None):
                rank_zero_info("of the base only the embedding, the final norm and the LM head are kept")
                decoder.layers = None  # running the base is an error from now on
        elif self.shard_base and self.trainer.world_size > 1:
            self.base_hash()  # needs whole weights
            shard_layers(self.base, self.trainer.strategy.root_device)
        self.base.move_to(self.trainer.strategy.root_device)  # the strategy moves this module only after setup
        prepare_process(self.trainer.strategy.root_device)

    def runs_base(self, trainer: L.Trainer) -> bool:
        """Whether training or validation run the base, instead of reading all its outputs in a feature store."""
        data: Any = getattr(trainer, "datamodule", None)
        if getattr(data, "store", None) is None:
            return True
        is_validated = data.val_set is not None and trainer.limit_val_batches
        return bool(is_validated) and (self.val_answers == "greedy" or data.val_places is None)

    def base_hash(self) -> str:
        """Return `base_hash` of the base, which is computed once."""
        self._base_hash = self._base_hash or base_hash(self.base)
        return self._base_hash

    def training_batch(self, batch: dict[str, Tensor]) -> TrainingBatch:
        """Add the base's outputs to a batch: those of the feature store if the batch comes from one."""
        layers = self.drafter.required_outputs.hidden_layers
        if "hidden" in batch:
            return read_features(batch, layers, self.base.model.dtype)
        return compute_features(self.base, layers, batch["input_ids"], batch["loss_mask"])

    def on_fit_start(self) -> None:
        self.divisor = SharedDivisor(partial(self.trainer.strategy.reduce, reduce_op="sum"), self.trainer.world_size)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        with_outputs = replace(self.training_batch(batch), divisor=self.divisor)
        loss, metrics = self.drafter.loss(with_outputs, self.base.base_weights)
        self.log("train/loss", loss, prog_bar=True, sync_dist=True)
        self.log_dict({f"train/{name}": value for name, value in metrics.items()}, sync_dist=True)
        return self.divisor.weighted(loss) if self._weights_batches else loss

    @property
    def _weights_batches(self) -> bool:
        # DeepSpeed gives no access to its gradients, which the last batch of a step has to correct.
        return self.trainer.accumulate_grad_batches > 1 and not is_deepspeed(self.trainer)

    def on_after_backward(self) -> None:
        if self._weights_batches and not is_accumulating(self.trainer):
            self.divisor.correct(self.drafter.parameters(), self.trainer.accumulate_grad_batches)

    def configure_gradient_clipping(self, *args: Any, **options: Any) -> None:
        # A step that is skipped has no gradients, and clipping by value cannot do with none.
        if any(weight.grad is not None for weight in self.drafter.parameters()):
            super().configure_gradient_clipping(*args, **options)

    def validation_texts(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return the texts that validation decodes: a held-out batch, or the base's own answers to its prompts."""
        if self.val_answers == "text":
            return batch
        if batch_idx not in self._generated_batches:
            self._generated_batches[batch_idx] = with_own_answers(self.base, batch, self.max_val_tokens)
        return {name: value.to(self.device) for name, value in self._generated_batches[batch_idx].items()}

    def validation_loss(self, outputs: TrainingBatch, batch_idx: int) -> Tensor:
        """The loss at anchors that are the same in every validation; the random generators stay as they are."""
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed((self.global_rank << 32) + batch_idx)
            return self.drafter.loss(outputs, self.base.base_weights)[0]

    drafting: LearnedDrafter  # what drafts in a validation

    def on_validation_start(self) -> None:
        self.__dict__["drafting"] = self.drafter
        if gathers_in_forwards(self.trainer):  # and processes draft for different numbers of tokens
            node = self.hparams["drafter"]
            config = DrafterConfig(
                node["class_path"], dict(node.get("init_args") or {}), self.shape, self.base.name, ""
            )
            self.__dict__["drafting"] = config.build(gathered_weights(self.drafter)).to(self.device)

    def on_validation_end(self) -> None:
        del self.__dict__["drafting"]  # and its memory

    on_test_start, on_test_end = on_validation_start, on_validation_end

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        texts = self.validation_texts(batch, batch_idx)
        outputs = self.training_batch(texts)
        loss = self.validation_loss(outputs, batch_idx)
        self.log("val/loss", loss, batch_size=len(outputs.labels), sync_dist=True)
        for emitted in simulate_answers(self.drafting, self.base, outputs.hidden, outputs.input_ids, outputs.loss_mask):
            self.acceptance.update(emitted)

    def on_validation_epoch_end(self) -> None:
        length, shares = self.acceptance.compute()
        if not self.trainer.sanity_checking:
            self.measured = {"step": self.global_step, "acceptance_length": float(length)}
        # The metrics are the same on all processes already; sync_dist keeps Lightning from warning about each.
        self.log("val/acceptance_length", length, prog_bar=True, sync_dist=True)
        by_depth, before = {}, 1.0
        for depth, reached in enumerate(shares.tolist(), start=1):
            by_depth[f"val/accepted_{depth}_or_more"] = reached
            by_depth[f"val/accepted_{depth}_given_{depth - 1}"] = reached / before if before else 0.0
            before = reached
        self.log_dict(by_depth, sync_dist=True)
        self.acceptance.reset()

    test_step, on_test_epoch_end = validation_step, on_validation_epoch_end

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["measured"] = self.measured
        if is_deepspeed(self.trainer):
            weights = whole_weights(self.drafter)
            if self.trainer.is_global_zero:
                checkpoint[WHOLE_WEIGHTS] = {f"drafter.{name}": weight for name, weight in weights.items()}
        checkpoint["base"] = {
            "shape": vars(self.shape),
            "name": self.base.name,
            "tokenizer_hash": tokenizer_hash(self.base.tokenizer),
            "weights_hash": self.base_hash(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the checkpoint of another drafter, or one that was trained for another base."""
        self.measured, trained_for = checkpoint["measured"], checkpoint["base"]
        # Rotations and norms depend on more of the shape than the weights show.
        expected = {"tokenizer_hash": tokenizer_hash(self.base.tokenizer), "shape": vars(self.shape)}
        if self.trainer.state.fn == TrainerFn.FITTING:
            expected["weights_hash"] = self.base_hash()
            for name in ("learning_rate", "weight_decay"):  # of the optimizer's state
                if (before := checkpoint["hyper_parameters"][name]) != self.hparams[name]:
                    raise ValueError(
                        f"model.{name} was {before} and is {self.hparams[name]}, which a training that goes on cannot "
                        "change: leave it, or begin another with --model.initial_drafter"
                    )
        if differing := [name for name, value in expected.items() if trained_for[name] != value]:
            raise ValueError(
                f"the checkpoint was trained for {trained_for['name']}, whose {differing[0]} is not that of "
                f"{self.base.name}: give model.base, model.base_dtype and model.initial_drafter as they were"
            )
        weights = checkpoint.get("state_dict", self.state_dict())  # a sharding strategy has loaded them already
        shapes = {(name, weight.shape) for name, weight in self.state_dict().items()}
        if other_shapes := shapes ^ {(name, weight.shape) for name, weight in weights.items()}:
            raise ValueError(
                f"the checkpoint holds another drafter than the config ({min(other_shapes)[0]} differs): "
                "pass the config it was trained with"
            )

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        options = self.hparams
        if isinstance(self.trainer.strategy, FSDPStrategy):
            raise ValueError("trainer.strategy fsdp makes all weights flat: take --config strategy/fsdp.yaml")
        optimizer = OPTIMIZERS[options["optimizer"]](self, options["learning_rate"], options["weight_decay"])
        return with_schedule(self, optimizer, options["warmup_steps"], options["schedule"])
