"""Tokenises conversations once, into a cached Arrow table, and counts what it holds."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data.conversations import Conversation, Dropped
from data.files import disk_errors, hash_of
from data.templates import encode, resolve_template

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

FORMAT_VERSION = 6  # part of the cache key: raise it when `encode` or the columns change


def describe(rows: Dataset) -> str:
    """Say in a line how many conversations and tokens a tokenised data set has."""
    sizes, masks = sorted(lengths(rows)), rows.with_format("arrow")[:]["loss_mask"]
    learned = pc.sum(pc.list_flatten(masks)).as_py()
    return (
        f"{len(rows):,} conversations, {sum(sizes):,} tokens, {learned:,} of the assistant "
        f"({learned / sum(sizes):.0%}), median length {sizes[len(sizes) // 2]:,}, longest {sizes[-1]:,}"
    )


def lengths(rows: Dataset) -> list[int]:
    """Return the number of tokens of each row, computed from the table's offsets without reading the tokens."""
    return pc.list_value_length(rows.with_format("arrow")[:]["input_ids"]).to_pylist()


def check_tokens(rows: Dataset | None, tokenizer: PreTrainedTokenizerBase, num_rows: int) -> None:
    """Raise ValueError if a conversation has a token that a base with this many rows in its embedding cannot read."""
    if rows is None or len(tokenizer) <= num_rows:
        return
    for row in rows.with_format("numpy", ["id", "input_ids"]):
        if (token := int(row["input_ids"].max())) >= num_rows:
            raise ValueError(
                f"conversation {row['id']} has the token {token} ({tokenizer.convert_ids_to_tokens(token)}), for which "
                f"the base has no embedding, but only for 0 to {num_rows - 1}: leave it out"
            )


def assistant_token_counts(rows: Dataset, vocab_size: int) -> np.ndarray:
    """Count how often the assistant writes each token: (vocab_size,) int64."""
    counts = np.zeros(vocab_size, np.int64)
    for part in rows.with_format("arrow").iter(batch_size=1000):
        ids, mask = (pc.list_flatten(part[name]).to_numpy() for name in ("input_ids", "loss_mask"))
        counts += np.bincount(ids[mask.astype(bool)], minlength=vocab_size)
    return counts


def tokenise(
    conversations: Sequence[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    max_length: int | None,
    cache_dir: str | None = None,
) -> Dataset:
    """Return rows of ``input_ids`` (S,) int32, ``loss_mask`` (S,) int8 and ``id``, from the cache if they are there.

    Conversations that the template refuses, or without an assistant token among the first `max_length`, are left out;
    ValueError is raised if that leaves none. The folder of the cache is by default $DRAFTERS_CACHE, or else
    ~/.cache/drafters. Other arguments are those of `data.templates.encode`.
    """
    from datasets import Dataset

    folder = Path(cache_dir or os.environ.get("DRAFTERS_CACHE") or "~/.cache/drafters").expanduser()
    # The fingerprints of `datasets` hash code and pickles, so they change without need or miss a change.
    key = hash_of(_identity(conversations, tokenizer, resolve_template(template, tokenizer), max_length), 24)
    path = folder / f"tokens-{key}.arrow"
    if not path.is_file():
        table = _encode_all(conversations, tokenizer, template, max_length)
        folder.mkdir(parents=True, exist_ok=True)
        # Written elsewhere and renamed, so that no reader sees half a table even if two processes write.
        with disk_errors(path), tempfile.TemporaryDirectory(dir=folder, prefix="writing-") as temporary:
            with pa.ipc.new_stream(f"{temporary}/rows", table.schema) as stream:
                stream.write_table(table)
            os.replace(f"{temporary}/rows", path)
    return Dataset.from_file(str(path))


def _identity(
    conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase, text: str, max_length: int | None
) -> Iterator[object]:
    """Yield everything that the rows depend on."""
    special = sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items())
    yield [FORMAT_VERSION, tokenizer.backend_tokenizer.to_str(), special, text, max_length]
    for conversation in conversations:
        yield [conversation.id, conversation.messages, conversation.tools, sorted(conversation.not_learned)]
        if recorded := conversation.recorded:
            yield from (recorded.input_ids.tobytes(), recorded.loss_mask.tobytes())
            yield [recorded.tokenizer, recorded.template]


def _encode_all(
    conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase, template: str, max_length: int | None
) -> pa.Table:
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
    if refused.counts:
        logging.getLogger(__name__).warning("%s", refused)
    if not columns["id"] and refused.counts.total() == len(conversations):
        raise ValueError(f"template {template!r} refuses every conversation: {refused}")
    if not columns["id"]:
        raise ValueError(
            f"the loss mask is zero everywhere: template {template!r} marks no assistant token within the first "
            f"{max_length} tokens of any of {len(conversations)} conversations; raise max_length, or choose another "
            "template and check it with `drafters show-mask`"
        )
    types = {"input_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.int8()), "id": pa.string()}
    return pa.table(columns, schema=pa.schema(types.items()))
