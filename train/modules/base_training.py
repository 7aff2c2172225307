"""Pre-training of a small LLaMA base, so that the project can be tried without downloading one."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor

from data.tokenizer import load_tokenizer
from train.modules.optimizer import adamw


class BaseTraining(L.LightningModule):
    """Train a small `LlamaForCausalLM` from nothing on conversations, the loss on assistant tokens weighted higher.

    Args:
        tokenizer: Folder of the tokenizer; it gives the vocabulary.
        hidden_size: Width D.
        num_layers: Decoder layers.
        num_heads: Attention heads.
        intermediate_size: Width of the feed-forward layer.
        context_length: Positions the base is said to hold.
        prompt_weight: Weight of the loss on tokens that are not the assistant's.
        learning_rate: Peak of the schedule.
        weight_decay: Of matrices.
        warmup_steps: Steps of linear warm-up; a cosine to zero follows.
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
        real = torch.arange(1, batch["input_ids"].shape[1], device=targets.device) < batch["lengths"][:, None]
        weights = torch.where(batch["loss_mask"][:, 1:], 1.0, self.prompt_weight) * real
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        return (losses * weights).sum() / weights.sum()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val/loss", self._loss(batch), prog_bar=True, batch_size=len(batch["input_ids"]), sync_dist=True)

    def configure_optimizers(self):
        return adamw(self, self.learning_rate, self.weight_decay, self.warmup_steps, "cosine")
