"""The LightningDataModule: conversations in files become batches for training and validation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import DataLoader

from data.batch import BucketSampler, collate
from data.conversation import resolve_template
from data.feature_store.store import FeatureStore, StoredRows
from data.sharegpt import Statistics, lengths, load, tokenise
from data.tokenizer import load_tokenizer, short_hash, tokenizer_hash

if TYPE_CHECKING:
    from datasets import Dataset

    from data.conversation import Conversation


class ResumableLoader(DataLoader):
    """A DataLoader that continues in the middle of an epoch.

    Its state is the trainer's own counters: what was prefetched does not count, and every rank has the same state.
    """

    trainer: L.Trainer | None = None

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of its batches that were trained on; after the last, the next epoch and 0."""
        batch, epoch = self.trainer.fit_loop.epoch_loop.batch_progress.current, self.batch_sampler.epoch
        is_over = batch.processed == batch.ready >= self.trainer.num_training_batches
        return {"epoch": epoch + 1, "batch": 0} if is_over else {"epoch": epoch, "batch": batch.processed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Skip the batches that were trained on, the next time an iteration starts."""
        self.batch_sampler.set_epoch(state["epoch"])
        self.batch_sampler.start = state["batch"] % len(self.batch_sampler)


class ShareGPTData(L.LightningDataModule):
    """Conversations in ShareGPT form, tokenised once, in batches of similar length.

    Args:
        tokenizer: folder or hub id of the base's tokenizer; on the command line the model's base by default.
        files: conversations: .json or .jsonl (also .gz) or .parquet files, `hub:OWNER/NAME[[:CONFIG]:SPLIT]` or
            `hub:OWNER/NAME/FILE` of the Hugging Face hub, or `embedded[:COUNT[:SEED]]` for the project's own corpus.
        val_files: files for validation; without them `val_size` conversations of `files` are held out.
        val_size: conversations held out of `files` where there are no `val_files`; 0 for none.
        template: chat template, `tokenizer` for the tokenizer's own, or `vicuna_v1.1`, `llama2_chat`.
        max_length: longest conversation in tokens; what is beyond is cut off.
        batch_size: conversations a batch and device at most.
        seed: of the held-out choice and of the order of the batches.
        num_workers: processes that read ahead.
        limit: read at most this many conversations.
        cache_dir: folder of the tokenised data, by default $DRAFTERS_CACHE or ~/.cache/drafters.
        features: folder that `drafters features` wrote from these files: training reads the base's hidden states and
            labels there in place of running it; validation runs the base as ever.
        max_tokens: tokens a batch and device at most, padding among them: many short conversations or a few long ones;
            without it every batch has `batch_size` conversations.
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
        features: str | None = None,
        max_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.store: FeatureStore | None = None
        self.train_set: Dataset | None = None
        self.val_set: Dataset | None = None

    def prepare_data(self) -> None:
        """Fill the cache, on one process of each machine."""
        self._load()

    def setup(self, stage: str | None = None) -> None:
        """Load the tokenised data, and for training see that the feature store fits it."""
        self._load()
        if self.hparams.features and stage in (None, "fit") and self.store is None:
            self.store, self._places = self._open_store()

    def _load(self) -> None:
        if self.train_set is not None:
            return
        args = self.hparams
        if not args.tokenizer or not args.files:
            raise ValueError("nothing to train on: give data.tokenizer (a base's folder or hub id) and data.files")
        self.tokenizer_object = load_tokenizer(args.tokenizer)
        pad_ids = (self.tokenizer_object.pad_token_id, self.tokenizer_object.eos_token_id, 0)
        self.pad_id = next(token for token in pad_ids if token is not None)
        train, dropped = load(args.files, args.limit)
        val: list[Conversation] = []
        if dropped.total:
            rank_zero_info(str(dropped))
        if args.val_files:
            val, dropped = load(args.val_files, args.limit)
            if dropped.total:
                rank_zero_info(f"validation: {dropped}")
        else:
            train, val = split(train, args.val_size, args.seed)
        self.val_set = self._tokenise("validation", val) if val else None
        self.train_set = self._tokenise("training", train)

    def _open_store(self) -> tuple[FeatureStore, list[tuple[int, int, int]]]:
        args, tokenizer = self.hparams, self.tokenizer_object
        store = FeatureStore(args.features)
        template = short_hash(resolve_template(args.template, tokenizer))
        store.check(tokenizer_hash(tokenizer), template, args.template, args.max_length)
        places = store.find(self.train_set)
        rank_zero_info(f"training: hidden states of {len(places):,} conversations come from {store.folder}")
        return store, places

    def _tokenise(self, name: str, conversations: list[Conversation]) -> Dataset:
        args = self.hparams
        rows = tokenise(conversations, self.tokenizer_object, args.template, args.max_length, args.cache_dir)
        empty = len(conversations) - len(rows)
        note = (
            f"; {empty} left out: refused by the template, or no assistant token within {args.max_length} tokens"
            if empty
            else ""
        )
        rank_zero_info(f"{name}: {Statistics.of(rows)}{note}")
        return rows

    def train_dataloader(self) -> ResumableLoader:
        """Return batches in an order that depends on seed and epoch, and that a resumed run continues."""
        loader = self._loader(self.train_set, is_shuffled=True)
        loader.trainer = self.trainer
        rank_zero_info(f"training: {planned(loader.batch_sampler, self.trainer)}")
        return loader

    def val_dataloader(self) -> DataLoader | list:
        """Return the held-out conversations, in one order."""
        return self._loader(self.val_set, is_shuffled=False) if self.val_set is not None else []

    def test_dataloader(self) -> DataLoader | list:
        """Return the held-out conversations: there is no other set."""
        return self.val_dataloader()

    def _loader(self, rows: Dataset, is_shuffled: bool) -> ResumableLoader:
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        if world_size > 1 and self.trainer._accelerator_connector.use_distributed_sampler:
            raise ValueError(
                "the batches are shared out over the ranks already; set trainer.use_distributed_sampler: false"
            )
        is_stored = self.store is not None and rows is self.train_set
        source = rows.select_columns(["input_ids", "loss_mask"]).with_format("numpy")
        return (ResumableLoader if is_shuffled else DataLoader)(
            StoredRows(self.store, self._places) if is_stored else source,
            batch_sampler=BucketSampler(
                lengths(rows),
                self.hparams.batch_size,
                self.hparams.seed,
                rank,
                world_size,
                is_shuffled,
                self.hparams.max_tokens,
            ),
            collate_fn=partial(collate, pad_id=self.pad_id),
            num_workers=self.hparams.num_workers,
        )


def planned(batches: BucketSampler, trainer: L.Trainer | None) -> str:
    """Say how many batches an epoch has, how much of them is padding, and how many steps the trainer will take."""
    text = f"{len(batches):,} batches an epoch and device, {batches.padding_share():.1%} of their tokens padding"
    if trainer is None:
        return text
    limit = trainer.limit_train_batches
    num_batches = int(len(batches) * limit) if isinstance(limit, float) else min(len(batches), limit)
    per_epoch = -(-num_batches // trainer.accumulate_grad_batches)  # the last step of an epoch may take fewer batches
    ends = [per_epoch * trainer.max_epochs] if trainer.max_epochs not in (None, -1) else []
    ends += [trainer.max_steps] if trainer.max_steps != -1 else []
    return f"{text}; {min(ends):,} steps, {per_epoch:,} an epoch" if ends else text


def split(conversations: list[Conversation], val_size: int, seed: int) -> tuple[list[Conversation], list[Conversation]]:
    """Hold out the last `val_size` conversations of a seeded shuffle; the order of the others is kept as it was."""
    if val_size >= len(conversations):
        raise ValueError(
            f"val_size {val_size} leaves nothing of {len(conversations)} conversations to train on; "
            "lower it, or give val_files"
        )
    order = random.Random(seed).sample(range(len(conversations)), len(conversations))
    held_out = set(order[len(order) - val_size :])
    train = [conversation for n, conversation in enumerate(conversations) if n not in held_out]
    return train, [conversation for n, conversation in enumerate(conversations) if n in held_out]
