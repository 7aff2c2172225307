"""BaseTraining: the LightningModule that pre-trains a small LLaMA base, so that none has to be downloaded."""

from __future__ import annotations

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor

from data.tokenizer import load_tokenizer
from train.optimizer import adamw
from train.size_check import check_size


class BaseTraining(L.LightningModule):
    """Train a small `LlamaForCausalLM` from scratch on conversations, with a higher loss weight on assistant tokens.

    Args:
        tokenizer: Folder of the tokenizer, which determines the vocabulary.
        hidden_size: Width D of the hidden states.
        num_layers: Number of decoder layers.
        num_heads: Number of attention heads.
        intermediate_size: Width of the feed-forward layers.
        context_length: Maximum number of positions of the base.
        prompt_weight: Loss weight of tokens that are not the assistant's, which weigh 1.
        learning_rate: Peak learning rate of AdamW.
        weight_decay: Weight decay of matrices; other parameters have none.
        warmup_steps: Steps of linear warm-up, followed by a cosine decay to zero.
    """

    def __init__(
        self,
        tokenizer: str,
        hidden_size: int = 192,
        num_layers: int = 8,
        num_heads: int = 6,
        intermediate_size: int = 512,
        context_length: int = 1024,
        prompt_weight: float = 0.2,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 50,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.prompt_weight, self.learning_rate = prompt_weight, learning_rate
        self.weight_decay, self.warmup_steps = weight_decay, warmup_steps
        from transformers import LlamaConfig, LlamaForCausalLM

        vocabulary = load_tokenizer(tokenizer)
        check_size(len(vocabulary), hidden_size, num_layers, intermediate_size)
        if num_heads < 1 or hidden_size % num_heads or context_length < 1:
            raise ValueError(
                f"num_heads {num_heads} must divide hidden_size {hidden_size}, and context_length {context_length} "
                "must be at least 1"
            )
        config = LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            intermediate_size=intermediate_size,
            max_position_embeddings=context_length,
            bos_token_id=vocabulary.bos_token_id,
            eos_token_id=vocabulary.eos_token_id,
            pad_token_id=vocabulary.pad_token_id,
            tie_word_embeddings=False,
        )
        self.model = LlamaForCausalLM(config)

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(batch["input_ids"]).logits[:, :-1].float()
        targets = batch["input_ids"][:, 1:]
        is_token = torch.arange(1, batch["input_ids"].shape[1], device=targets.device) < batch["lengths"][:, None]
        weights = torch.where(batch["loss_mask"][:, 1:], 1.0, self.prompt_weight) * is_token
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        return (losses * weights).sum() / weights.sum()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val/loss", self._loss(batch), prog_bar=True, batch_size=len(batch["input_ids"]), sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        return adamw(self, self.learning_rate, self.weight_decay, self.warmup_steps, "cosine")
