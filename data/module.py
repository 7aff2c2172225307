"""The LightningDataModule that turns files of conversations into batches for training and validation."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import DataLoader

from data.batches import BucketSampler, collate
from data.conversations import Conversation, load_conversations
from data.features import FeatureStore, StoredRows, stored_template
from data.rows import describe, lengths, tokenise
from data.templates import template_hash, with_date
from data.tokenizer import load_tokenizer, tokenizer_hash

if TYPE_CHECKING:
    from datasets import Dataset

Loader = TypeVar("Loader", bound=DataLoader)


class ResumableLoader(DataLoader):
    """A DataLoader that can continue in the middle of an epoch.

    Its state comes from the trainer's counters, so that prefetched batches do not count and all ranks agree.
    """

    batch_sampler: BucketSampler
    trainer: L.Trainer

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and how many of its batches were trained on; after the last batch, the next epoch and 0."""
        batch: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        epoch = self.batch_sampler.epoch
        is_over = batch.processed == batch.ready >= self.trainer.num_training_batches
        return {"epoch": epoch + 1, "batch": 0} if is_over else {"epoch": epoch, "batch": batch.processed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Skip the batches that were trained on when the next iteration starts."""
        self.batch_sampler.set_epoch(state["epoch"])
        self.batch_sampler.start = state["batch"] % len(self.batch_sampler)


class ShareGPTData(L.LightningDataModule):
    """Conversations in ShareGPT form, tokenised once, in batches of similar length.

    The arguments are the keys below `data` in a config.

    Args:
        tokenizer: Folder or hub id of the tokenizer. On the command line the default is the model's base.
        files: Conversations: .json or .jsonl (also .gz) or .parquet files, `hub:OWNER/NAME[[:CONFIG]:SPLIT]` or
            `hub:OWNER/NAME/FILE` on the Hugging Face hub, or `embedded[:COUNT[:FIRST]]` for the project's own corpus.
        val_files: Files of conversations for validation. By default `val_size` conversations of `files` are held out.
        val_size: Number of conversations of `files` held out for validation if `val_files` is not given; 0 for none.
            Conversations with the same user messages are held out together.
        template: Chat template: `tokenizer` for the tokenizer's own, whose thinking switch `tokenizer:thinking=on` or
            `tokenizer:thinking=off` sets, `vicuna_v1.1` or `llama2_chat`.
        max_length: Largest number of tokens per conversation; the rest is cut off.
        batch_size: Largest number of conversations per batch and device.
        seed: Seed of the choice of held-out conversations and of the order of the batches.
        num_workers: Number of worker processes that load batches ahead; 0 loads them in the main process.
        limit: Largest number of conversations to read. By default all are read.
        cache_dir: Folder for the tokenised conversations. The default is $DRAFTERS_CACHE, or else ~/.cache/drafters.
        features: Folder of a feature store that `drafters features` wrote from the same files, or of several stores
            that hold them together. Training then reads the base's hidden states and labels from it instead of running
            the base, and so does validation on the held-out text (``model.val_answers``), if the store has it: of the
            base little is loaded then.
        max_tokens: Largest number of tokens per batch and device, padding included, so that a batch holds many short
            conversations or a few long ones. By default only `batch_size` limits a batch.
    """

    def __init__(
        self,
        tokenizer: str | None = None,
        files: Sequence[str] = (),
        val_files: list[str] | None = None,
        val_size: int = 64,
        template: str = "tokenizer",
        max_length: int = 2048,
        batch_size: int = 8,
        seed: int = 0,
        num_workers: int = 0,
        limit: int | None = None,
        cache_dir: str | None = None,
        features: list[str] | str | None = None,
        max_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.store: FeatureStore | None = None
        self.train_set: Dataset | None = None
        self.val_set: Dataset | None = None
        self.val_places: list[tuple[int, int, int]] | None = None  # where validation reads the store, if it does

    def prepare_data(self) -> None:
        """Tokenise the conversations into the cache, in one process per machine."""
        self._load()

    def setup(self, stage: str | None = None) -> None:
        """Load the tokenised conversations and, for training, check that the feature store matches them."""
        self._load()
        options, tokenizer = self.hparams, self.tokenizer_object
        if self._stores and stage in (None, "fit") and self.store is None:
            store = FeatureStore(*self._stores)
            template = template_hash(self.template, tokenizer)
            store.check(tokenizer_hash(tokenizer), template, self.template, options["max_length"])
            self.store, self._places = store, store.find(self.train_set)
            with suppress(ValueError):  # they may come from files of which there is no store
                self.val_places = store.find(self.val_set) if self.val_set is not None else None
            rank_zero_info(
                f"training: the hidden states of {len(self._places):,} conversations come from "
                f"{', '.join(map(str, self._stores))}"
            )

    def _load(self) -> None:
        if self.train_set is not None:
            return
        options = self.hparams
        if not options["tokenizer"] or not options["files"]:
            raise ValueError("nothing to train on: give data.tokenizer (a base's folder or hub id) and data.files")
        self.tokenizer_object = load_tokenizer(options["tokenizer"])
        self.template = options["template"]
        features = options["features"] or []
        self._stores = [features] if isinstance(features, str) else features
        if self._stores:  # a template may write the date of the day on which the store was written
            self.template = with_date(self.template, self.tokenizer_object, stored_template(self._stores[0]))
        train = self._read("training", options["files"])
        if options["val_files"]:
            val = self._read("validation", options["val_files"])
        else:
            train, val = hold_out(train, options["val_size"], options["seed"])
        self.val_set = self._tokenise("validation", val) if val else None
        self.train_set = self._tokenise("training", train)

    def _read(self, name: str, files: Sequence[str]) -> list[Conversation]:
        conversations, dropped = load_conversations(files, self.hparams["limit"])
        rank_zero_info(f"{name}: {len(conversations):,} conversations read, {dropped}")
        return conversations

    def _tokenise(self, name: str, conversations: list[Conversation]) -> Dataset:
        max_length, cache_dir = self.hparams["max_length"], self.hparams["cache_dir"]
        rows = tokenise(conversations, self.tokenizer_object, self.template, max_length, cache_dir)
        reasons = f"refused by the template, or no assistant token within {max_length} tokens"
        num_empty = len(conversations) - len(rows)
        rank_zero_info(f"{name}: {describe(rows)}{f'; {num_empty} left out: {reasons}' if num_empty else ''}")
        return rows

    def train_dataloader(self) -> ResumableLoader:
        """Return training batches in an order that depends on the seed and the epoch; a resumed run continues it."""
        loader = self._loader(ResumableLoader, self.train_set, is_shuffled=True)
        if self.trainer is not None:
            loader.trainer = self.trainer
        rank_zero_info(f"training: {describe_epoch(loader.batch_sampler, self.trainer)}")
        return loader

    def val_dataloader(self) -> DataLoader | list:
        """Return the held-out conversations, always in the same order."""
        return self._loader(DataLoader, self.val_set, is_shuffled=False) if self.val_set is not None else []

    def test_dataloader(self) -> DataLoader | list:
        """Return the validation batches; there is no separate test set."""
        return self.val_dataloader()

    def _loader(self, loader_class: type[Loader], rows: Dataset, is_shuffled: bool) -> Loader:
        options, trainer = self.hparams, self.trainer
        source = rows.select_columns(["input_ids", "loss_mask"]).with_format("numpy")
        places = self._places if self.store is not None and rows is self.train_set else self.val_places
        if self.store is not None and places is not None:
            source = StoredRows(self.store, places)
        rank, world_size = (trainer.global_rank, trainer.world_size) if trainer is not None else (0, 1)
        size, seed, max_tokens = options["batch_size"], options["seed"], options["max_tokens"]
        sampler = BucketSampler(lengths(rows), size, seed, rank, world_size, is_shuffled, max_tokens)
        return loader_class(
            source,
            batch_sampler=sampler,
            collate_fn=collate,
            num_workers=options["num_workers"],
            persistent_workers=options["num_workers"] > 0,
            pin_memory=torch.cuda.is_available(),  # so that a copy to the GPU does not wait
        )


def describe_epoch(batches: BucketSampler, trainer: L.Trainer | None) -> str:
    """Describe the number of batches per epoch, their share of padding, and the number of steps of the trainer."""
    text = f"{len(batches):,} batches an epoch and device, {batches.padding_share():.1%} of their tokens padding"
    if trainer is None:
        return text
    limit = trainer.limit_train_batches
    num_batches = int(len(batches) * limit) if isinstance(limit, float) else min(len(batches), limit)
    per_epoch = -(-num_batches // trainer.accumulate_grad_batches)  # the last step of an epoch may take fewer batches
    ends = [per_epoch * trainer.max_epochs] if trainer.max_epochs not in (None, -1) else []
    ends += [trainer.max_steps] if trainer.max_steps != -1 else []
    return f"{text}; {min(ends):,} steps, {per_epoch:,} an epoch" if ends else text


def hold_out(
    conversations: list[Conversation], val_size: int, seed: int
) -> tuple[list[Conversation], list[Conversation]]:
    """Split conversations into a training and a validation set, both in their original order.

    Conversations with the same user messages, like several answers to one prompt, are all in the same set, so that more
    than ``val_size`` may be held out. Raises ValueError if that leaves no conversation to train on.
    """
    if val_size < 0:
        raise ValueError(f"val_size must be at least 0, not {val_size}")
    prompts = [
        tuple(message["content"] for message in conversation.messages if message["role"] == "user")
        for conversation in conversations
    ]
    counts, order = Counter(prompts), random.Random(seed).sample(prompts, len(prompts))
    held_out: set[tuple[str, ...]] = set()
    while order and sum(counts[prompt] for prompt in held_out) < val_size:
        held_out.add(order.pop())
    if len(held_out) == len(counts):
        raise ValueError(
            f"val_size {val_size} leaves nothing of {len(conversations)} conversations to train on, as those with the "
            "same user messages are held out together; lower it, or give val_files"
        )
    parts: tuple[list[Conversation], list[Conversation]] = [], []
    for conversation, prompt in zip(conversations, prompts, strict=True):
        parts[prompt in held_out].append(conversation)
    return parts
