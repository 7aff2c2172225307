"""Pre-training of a small LLaMA chat base, so that none has to be downloaded: tokenizer, training, export.

`python -m benchmarks.pretrain corpus OUT`, `tokenizer OUT`, then `fit --config FILE` and `export CKPT OUT`; `make
tiny-chat` runs all four.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from jsonargparse import auto_cli
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from benchmarks.pretrain.embedded import corpus
from data.conversations import Conversation, load_conversations
from data.files import atomic_folder, write_checksums
from data.tokenizer import load_tokenizer
from inference.verifier.base import prepare_process
from train.checkpoints import read_checkpoint
from train.cli import user_errors
from train.optimizer import adamw, with_schedule

VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


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
        optimizer = adamw(self, self.learning_rate, self.weight_decay)
        return with_schedule(self, optimizer, self.warmup_steps, "cosine")


def tokenizer(
    out: str,
    vocab_size: int = 1024,
    files: list[str] = ["embedded"],  # noqa: B006
) -> None:
    """Train a small byte-level BPE tokenizer on conversations, with the Vicuna chat template.

    Args:
        out: Folder to write.
        vocab_size: Size of the vocabulary, including 256 bytes and three special tokens.
        files: Conversations to train on.
    """
    if (Path(out) / "tokenizer.json").exists():
        raise ValueError(f"{out} already holds a tokenizer: give another folder")
    conversations, _ = load_conversations(files)
    trained = train_tokenizer(conversations, vocab_size)
    with atomic_folder(out) as folder:
        trained.save_pretrained(folder)
    print(f"wrote {out}: {len(trained)} tokens of {len(conversations):,} conversations")


def train_tokenizer(conversations: Iterable[Conversation], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer like that of checkpoints/tiny-chat: byte-level BPE, with the Vicuna template.

    It has ``vocab_size`` tokens, at least 259 (256 bytes and three special tokens).
    """
    speakers = {"user": "USER", "assistant": "ASSISTANT"}

    def texts() -> Iterator[str]:
        # With the words of the template around the turns, so that these get short tokens too.
        for conversation in conversations:
            yield VICUNA_SYSTEM
            said = [message for message in conversation.messages if message["role"] in speakers]
            yield from (f" {speakers[message['role']]}: {message['content']}" for message in said)

    model: Any = load_tokenizer("checkpoints/tiny-chat")
    return model.train_new_from_iterator(texts(), vocab_size, show_progress=False)


def export(ckpt: str, out: str, max_shard_size: str = "5GB") -> None:
    """Turn a checkpoint of the pre-training into an ordinary folder of transformers, in bfloat16.

    Args:
        ckpt: Checkpoint that ``fit`` wrote.
        out: Folder to write, or to replace.
        max_shard_size: Maximum size of a file of weights, such as 16MB.
    """
    saved = read_checkpoint(Path(ckpt))
    arguments = {name: value for name, value in saved["hyper_parameters"].items() if not name.startswith("_")}
    module = BaseTraining(**arguments)
    module.load_state_dict(saved["state_dict"])
    with atomic_folder(out, replaced=["model*.safetensors*"]) as folder:
        module.model.bfloat16().save_pretrained(folder, max_shard_size=max_shard_size)
        load_tokenizer(arguments["tokenizer"]).save_pretrained(folder)
        write_checksums(folder)
    print(f"wrote {out}")


def run(args: list[str]) -> None:
    """Run one of the four commands."""
    with user_errors("pretrain"):
        if args[:1] == ["fit"]:
            from train.lightning_cli import run as fit

            prepare_process(torch.device("cpu"))
            fit(args, shlex.join(["python", "-m", "benchmarks.pretrain", *args]), BaseTraining, "model.tokenizer")
        else:
            auto_cli([corpus, tokenizer, export], args=args)
