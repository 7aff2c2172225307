"""Loads conversations from files, and tokenises them once into a cached Arrow table."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from data.conversation import Conversation, encode, parse, resolve_template
from data.sources import read_records

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

FORMAT_VERSION = 3  # part of the cache key: raise it when `encode` or the columns change
NUM_EXAMPLES = 3
NUM_REASONS = 12


@dataclass
class Dropped:
    """Counts records that were left out, by reason, and remembers where the first of them are.

    Args:
        counts: Number of records per reason.
        examples: Place and reason of the first records.
        what: What is counted, in the plural.
    """

    counts: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    what: str = "records"

    def add(self, reason: str, place: str) -> None:
        """Count one record, and remember it if it is among the first `NUM_EXAMPLES` of its reason."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        if self.counts[reason] <= NUM_EXAMPLES and len(self.examples) < NUM_EXAMPLES * NUM_REASONS:
            self.examples.append(f"{place}: {reason}")

    @property
    def total(self) -> int:
        """Number of records left out, for any reason."""
        return sum(self.counts.values())

    def __str__(self) -> str:
        if not self.counts:
            return f"no {self.what} dropped"
        listed = sorted(self.counts.items(), key=lambda entry: -entry[1])
        reasons = ", ".join(f"{count} x {reason}" for reason, count in listed[:NUM_REASONS])
        if len(listed) > NUM_REASONS:
            reasons += f", {sum(count for _, count in listed[NUM_REASONS:])} for other reasons"
        return "\n  ".join([f"dropped {self.total} {self.what} ({reasons}), for example", *self.examples])


@dataclass(frozen=True)
class Statistics:
    """Size of a tokenised data set."""

    num_conversations: int
    num_tokens: int
    num_assistant_tokens: int
    median_length: int
    longest: int

    @classmethod
    def of(cls, rows: Dataset) -> Statistics:
        """Count the tokens of a data set returned by `tokenise`."""
        import pyarrow.compute as pc

        masks, sizes = rows.with_format("arrow")[:]["loss_mask"], sorted(lengths(rows))
        num_assistant_tokens = pc.sum(pc.list_flatten(masks)).as_py()
        return cls(len(rows), sum(sizes), num_assistant_tokens, sizes[len(sizes) // 2], sizes[-1])

    def __str__(self) -> str:
        share = self.num_assistant_tokens / self.num_tokens
        return (
            f"{self.num_conversations:,} conversations, {self.num_tokens:,} tokens, "
            f"{self.num_assistant_tokens:,} of the assistant ({share:.0%}), "
            f"median length {self.median_length:,}, longest {self.longest:,}"
        )


def lengths(rows: Dataset) -> list[int]:
    """Return the number of tokens of each row, computed from the table's offsets without reading the tokens."""
    import pyarrow.compute as pc

    return pc.list_value_length(rows.with_format("arrow")[:]["input_ids"]).to_pylist()


def assistant_token_counts(rows: Dataset, vocab_size: int) -> np.ndarray:
    """Count how often the assistant writes each token: (vocab_size,) int64."""
    import numpy as np
    import pyarrow.compute as pc

    counts = np.zeros(vocab_size, np.int64)
    for part in rows.with_format("arrow").iter(batch_size=1000):
        ids, mask = (pc.list_flatten(part[name]).to_numpy() for name in ("input_ids", "loss_mask"))
        counts += np.bincount(ids[mask.astype(bool)], minlength=vocab_size)
    return counts


def load_conversations(
    files: Sequence[str], limit: int | None = None, requires_answers: bool = True
) -> tuple[list[Conversation], Dropped]:
    """Load conversations, and count the records that cannot be parsed.

    Args:
        files: Paths, `hub:OWNER/NAME` or `embedded`, see `data.sources.read_records`.
        limit: Largest number of conversations to load in total. None loads all.
        requires_answers: Whether the assistant's turns must be present, see `parse`.

    Raises:
        ValueError: A file cannot be read, or holds no usable conversation.
    """
    conversations: list[Conversation] = []
    dropped = Dropped()
    for file in files:
        read, last_reason = 0, "no records"
        for number, (place, record) in enumerate(read_records(file), 1):
            if limit is not None and len(conversations) >= limit:
                return conversations, dropped
            try:
                conversations.append(parse(record, number, requires_answers))
                read += 1
            except ValueError as error:
                last_reason = str(error)
                dropped.add(last_reason, f"{Path(file).name} {place}")
        if not read:
            raise ValueError(
                f"{file}: no usable conversation ({last_reason}); "
                'expected records like {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", ...}]}'
            )
    return conversations, dropped


def tokenise(
    conversations: Sequence[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    max_length: int | None,
    cache_dir: str | None = None,
) -> Dataset:
    """Encode conversations into a table with the columns ``input_ids``, ``loss_mask`` and ``id``.

    The table is cached on disk: a second call with the same arguments reads it from there. Conversations without an
    assistant token within `max_length` are left out, so there may be fewer rows than conversations.

    Args:
        conversations: The conversations to encode.
        tokenizer: Tokenizer of the base.
        template: Name of the chat template, see `data.conversation.resolve_template`.
        max_length: Largest number of tokens per row; the rest is cut off. None keeps all.
        cache_dir: Folder of the cache. The default is $DRAFTERS_CACHE, or else ~/.cache/drafters.

    Raises:
        ValueError: No conversation has an assistant token to train on.
    """
    from datasets import load_from_disk

    key = _key(conversations, tokenizer, resolve_template(template, tokenizer), max_length)
    folder = Path(cache_dir or os.environ.get("DRAFTERS_CACHE") or "~/.cache/drafters").expanduser() / key
    if not folder.is_dir():
        _write(_encode_all(conversations, tokenizer, template, max_length), folder)
    return load_from_disk(str(folder))


def _key(
    conversations: Iterable[Conversation], tokenizer: PreTrainedTokenizerBase, text: str, max_length: int | None
) -> str:
    """Return the cache key: a hash of everything the rows depend on.

    The fingerprints of `datasets` hash code and pickles instead, so they change without need or miss a change.
    """
    digest = hashlib.sha256()
    special = sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items())
    for part in (FORMAT_VERSION, tokenizer.backend_tokenizer.to_str(), special, text, max_length):
        digest.update(json.dumps(part).encode() + b"\n")
    for conversation in conversations:
        digest.update(json.dumps([conversation.id, conversation.messages]).encode() + b"\n")
        if conversation.details or conversation.tools:
            parts = sorted(conversation.details.items()), conversation.tools
            digest.update(json.dumps(parts).encode() + b"\n")
        if recorded := conversation.recorded:
            digest.update(recorded.input_ids.tobytes() + recorded.loss_mask.tobytes())
            digest.update(f"{recorded.tokenizer} {recorded.template}\n".encode())
    return f"tokens-{digest.hexdigest()[:24]}"


def _encode_all(
    conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase, template: str, max_length: int | None
) -> Dataset:
    import numpy as np
    from datasets import Dataset, Features, List, Value
    from tqdm.auto import tqdm

    refused = Dropped()
    columns: dict[str, list] = {"input_ids": [], "loss_mask": [], "id": []}
    for conversation in tqdm(conversations, desc="tokenise", unit=" conversations", disable=None):
        try:
            ids, mask = encode(conversation, tokenizer, template, max_length)
        except ValueError as error:
            refused.add(str(error), f"conversation {conversation.id}")
            continue
        if any(mask):
            columns["input_ids"].append(np.array(ids, dtype=np.int32))
            columns["loss_mask"].append(np.array(mask, dtype=np.int8))
            columns["id"].append(conversation.id)
    if refused.total:
        logging.getLogger(__name__).warning("%s", refused)
    if not columns["id"] and refused.total == len(conversations):
        raise ValueError(f"template {template!r} refuses every conversation: {refused}")
    if not columns["id"]:
        raise ValueError(
            f"the loss mask is zero everywhere: template {template!r} marks no assistant token within the first "
            f"{max_length} tokens of any of {len(conversations)} conversations; raise max_length, or choose another "
            "template and check it with `drafters show-mask`"
        )
    features = Features({"input_ids": List(Value("int32")), "loss_mask": List(Value("int8")), "id": Value("string")})
    return Dataset.from_dict(columns, features=features)


def _write(rows: Dataset, folder: Path) -> None:
    """Save under a temporary name and rename, so that no reader sees half a table even if two processes write."""
    import datasets

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="writing-") as temporary:
        shown = datasets.is_progress_bar_enabled()
        datasets.disable_progress_bars()
        try:
            rows.save_to_disk(f"{temporary}/rows")
        finally:
            if shown:
                datasets.enable_progress_bars()
        try:
            os.rename(f"{temporary}/rows", folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process has written the same rows first
                raise
