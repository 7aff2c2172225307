"""``drafters features``: write the base's hidden states of conversations once, for many trainings."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from rich.filesize import decimal

from data.conversation import resolve_template
from data.feature_store.shards import BYTES_PER_ROW, StoreDtype, bytes_per_token
from data.feature_store.store import MANIFEST, Manifest
from data.files import safe_text
from data.sharegpt import Statistics, load_conversations, tokenise
from data.tokenizer import short_hash, tokenizer_hash
from inference.runs import folder_above
from inference.verifier.base import Base, Dtype, base_hash, load_base, resolve_device
from train.feature_store.base_features import dtype_name
from train.feature_store.plan import (
    Plan,
    Texts,
    divide_into_shards,
    find_written_shards,
    parse_layers,
    require_space,
)
from train.feature_store.writer import StoreWriter


def features(
    base: str,
    files: list[str],
    out: str,
    template: str = "tokenizer",
    max_length: int = 2048,
    limit: int | None = None,
    cache_dir: str | None = None,
    layers: str = "-1",
    with_last: bool = False,
    dtype: StoreDtype = "float16",
    base_dtype: Dtype = "float32",
    device: str = "auto",
    batch_size: int = 8,
    shard_megabytes: float = 256.0,
    verify: bool = False,
) -> None:
    """Write the base's hidden states and labels of conversations, for lightning fit --data.features OUT.

    The size of the store and the time to write it are printed first. A run that was interrupted continues with its
    first missing shard.

    Args:
        base: Folder or hub id of the base.
        files: Conversations, the same as data.files of the training.
        out: Folder of the store; an unfinished store of the same data in this folder is continued.
        template: Chat template, the same as data.template of the training.
        max_length: Maximum number of tokens of a conversation, the same as data.max_length of the training.
        limit: Maximum number of conversations to read; all if not given.
        cache_dir: Folder of the cache of tokenised conversations.
        layers: Base layers to store, like -1,2,5; 0 is the embedding and -1 the normed last hidden state.
        with_last: Store layer -1 too, which losses that distil the base's distribution read.
        dtype: Dtype of the stored states; int8 stores a scale for each token and layer.
        base_dtype: Dtype that the base runs in, the same as model.base_dtype of the training.
        device: Device to run on: cpu, cuda, or auto, which uses the GPU if there is one.
        batch_size: Conversations per forward pass of the base.
        shard_megabytes: Size of a shard in megabytes.
        verify: Compare the checksums of shards that an earlier run has written, not just their sizes.
    """
    folder = Path(out).expanduser()
    folder_above(folder / MANIFEST)
    if batch_size < 1 or shard_megabytes <= 0:
        raise ValueError(f"batch_size and shard_megabytes must be positive, not {batch_size} and {shard_megabytes}")
    loaded = load_base(base, base_dtype, resolve_device(device))
    _check_context(loaded, max_length)
    manifest = Manifest(
        base=base,
        base_hash=base_hash(loaded),
        base_dtype=dtype_name(loaded.model.dtype),
        tokenizer=tokenizer_hash(loaded.tokenizer),
        template=short_hash(resolve_template(template, loaded.tokenizer)),
        template_name=template,
        max_length=max_length,
        layers=parse_layers(layers, with_last, loaded.shape.num_layers),
        hidden_size=loaded.shape.hidden_size,
        dtype=dtype,
        rows="",
        num_rows=0,
        num_tokens=0,
        shard_bytes=int(shard_megabytes * 2**20),
        files=tuple(_describe(file) for file in files),
    )
    texts = _read_texts(loaded, files, limit, manifest, cache_dir)
    plan = _plan(folder, manifest, texts, verify)
    writer = StoreWriter(loaded, texts, plan, batch_size)
    _prepare(plan, texts, writer)
    writer.write_missing_shards()
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    print(f"wrote {folder}: {decimal(num_bytes)} in {len(plan.shards)} shards")


def _check_context(base: Base, max_length: int) -> None:
    if max_length > base.context_length:
        raise ValueError(
            f"max_length is {max_length}, but the context of {base.name} ends at {base.context_length}: "
            f"pass --max-length {base.context_length} or less"
        )


def _describe(file: str) -> dict[str, object]:
    """Return what the manifest says about an input file."""
    path = Path(file).expanduser()
    if not path.is_file():
        return {"name": file}  # embedded conversations, which their name determines
    return {"name": file, "bytes": path.stat().st_size, "modified": round(path.stat().st_mtime, 3)}


def _read_texts(base: Base, files: list[str], limit: int | None, manifest: Manifest, cache_dir: str | None) -> Texts:
    """Read and tokenise the conversations, and print how many there are."""
    conversations, dropped = load_conversations(files, limit)
    if dropped.total:
        print(safe_text(dropped))
    rows = tokenise(conversations, base.tokenizer, manifest.template_name, manifest.max_length, cache_dir)
    print(Statistics.of(rows))
    return Texts.of(rows)


def _plan(folder: Path, manifest: Manifest, texts: Texts, verify: bool) -> Plan:
    """Divide the conversations into shards, and find those that an earlier run has written."""
    per_token = bytes_per_token(len(manifest.layers), manifest.hidden_size, manifest.dtype)
    row_bytes = [length * per_token + BYTES_PER_ROW for length in texts.lengths]
    shards = divide_into_shards(texts.keys, row_bytes, manifest.shard_bytes)
    stored_rows = [row for shard in shards for row in shard]
    manifest = replace(
        manifest,
        rows=hashlib.sha256(b"".join(texts.keys[row] for row in stored_rows)).hexdigest(),
        num_rows=len(stored_rows),
        num_tokens=texts.num_tokens(stored_rows),
    )
    return Plan(folder, manifest, shards, find_written_shards(folder, manifest, verify))


def _prepare(plan: Plan, texts: Texts, writer: StoreWriter) -> None:
    """Print what is going to be written and how long it takes, after checking that it fits on the disk."""
    if plan.written:
        print(f"{len(plan.written)} of {len(plan.shards)} shards are there already")
    else:
        print(f"a new store in {plan.folder}")
    if not (rows := plan.missing_rows):
        return
    num_bytes = plan.num_bytes(rows, texts)
    require_space(plan.folder, num_bytes)
    plan.folder.mkdir(parents=True, exist_ok=True)
    print(
        f"to be written: {decimal(num_bytes)} in {len(plan.missing)} shards of {len(rows):,} conversations, "
        f"{texts.num_tokens(rows):,} tokens, layers {','.join(map(str, plan.manifest.layers))} in "
        f"{plan.manifest.dtype}; it will take about {timedelta(seconds=round(writer.estimate_seconds()))}",
        flush=True,
    )
