"""``drafters features``: the base's hidden states of conversations, written once for many trainings."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from data.conversation import resolve_template
from data.feature_store.shards import BYTES_PER_ROW, Shard, StoreDtype, bytes_per_token, checksum, keys
from data.feature_store.store import LAST, MANIFEST, Manifest, differing
from data.sharegpt import Statistics, lengths, load, tokenise
from data.tokenizer import short_hash, tokenizer_hash
from inference.engine.base import Dtype, base_hash, load_base, resolve_device
from inference.runs.outputs import folder_above
from train.feature_store.base_features import name_of
from train.feature_store.writer import estimated_seconds, shard_name, write


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

    Size and time are printed before the writing begins; a run that was stopped goes on with its first missing shard.

    Args:
        base: Folder or hub id of the base.
        files: ShareGPT files, or embedded: as data.files of the training.
        out: Folder of the store; a store of the same data that was not finished there is gone on with.
        template: As data.template of the training.
        max_length: As data.max_length of the training.
        limit: Read at most this many conversations.
        cache_dir: Folder of the tokenised data.
        layers: Base layers to store, as -1,2,5; 0 is the embedding and -1 the normed last state.
        with_last: Store layer -1 too: losses that distil the base's law read it.
        dtype: Number format of the states; int8 keeps a scale for each token and layer.
        base_dtype: Number format the base runs in, as model.base_dtype of the training.
        device: cpu, cuda or auto.
        batch_size: Conversations the base reads at a time.
        shard_megabytes: Size of a shard.
        verify: Compare the checksums of shards that are there already.
    """
    folder = Path(out).expanduser()
    folder_above(folder / MANIFEST)
    if batch_size < 1 or shard_megabytes <= 0:
        raise ValueError(f"batch_size and shard_megabytes must be positive, not {batch_size} and {shard_megabytes}")
    shard_bytes = int(shard_megabytes * 2**20)
    loaded = load_base(base, base_dtype, resolve_device(device))
    if max_length > loaded.context_length:
        raise ValueError(
            f"max_length is {max_length}, but the context of {base} ends at {loaded.context_length}: "
            f"pass --max-length {loaded.context_length} or less"
        )
    chosen = chosen_layers(layers, with_last, loaded.shape.num_layers)
    conversations, dropped = load(files, limit)
    if dropped.total:
        print(dropped)
    rows = tokenise(conversations, loaded.tokenizer, template, max_length, cache_dir)
    print(Statistics.of(rows))
    names, sizes = keys(rows), lengths(rows)
    per_token = bytes_per_token(len(chosen), loaded.shape.hidden_size, dtype)
    shards = planned(names, [size * per_token + BYTES_PER_ROW for size in sizes], shard_bytes)
    order = [row for shard in shards for row in shard]
    manifest = Manifest(
        base=base,
        base_hash=base_hash(loaded),
        base_dtype=name_of(loaded.model.dtype),
        tokenizer=tokenizer_hash(loaded.tokenizer),
        template=short_hash(resolve_template(template, loaded.tokenizer)),
        template_name=template,
        max_length=max_length,
        layers=chosen,
        hidden_size=loaded.shape.hidden_size,
        dtype=dtype,
        rows=hashlib.sha256(b"".join(names[row] for row in order)).hexdigest(),
        num_rows=len(order),
        num_tokens=sum(sizes[row] for row in order),
        shard_bytes=shard_bytes,
        files=tuple(described(file) for file in files),
    )
    there = written_before(folder, manifest, verify)
    missing = {number: shard for number, shard in enumerate(shards) if shard_name(number) not in there}
    todo = [row for shard in missing.values() for row in shard]
    num_tokens = sum(sizes[row] for row in todo)
    print(f"{len(there)} of {len(shards)} shards are there already" if there else f"a new store in {folder}")
    if missing:
        num_bytes = num_tokens * per_token + len(todo) * BYTES_PER_ROW
        require_room(folder, num_bytes)
        folder.mkdir(parents=True, exist_ok=True)
        seconds = estimated_seconds(loaded, rows, todo, sizes, manifest, batch_size, folder)
        print(
            f"to be written: {human(num_bytes)} in {len(missing)} shards of {len(todo):,} conversations, "
            f"{num_tokens:,} tokens, layers {','.join(map(str, chosen))} in {dtype}; "
            f"it will take about {timedelta(seconds=round(seconds))}",
            flush=True,
        )
    write(loaded, rows, names, missing, manifest, there, batch_size, folder)
    print(f"wrote {folder}: {human(sum(path.stat().st_size for path in folder.iterdir()))} in {len(shards)} shards")


def chosen_layers(layers: str, with_last: bool, num_layers: int) -> tuple[int, ...]:
    """The layers to store, from ``-1,2,5``; ValueError where the base has no such layer."""
    try:
        chosen = [int(layer) for layer in layers.split(",")]
    except ValueError:
        raise ValueError(f"layers is {layers!r}: give numbers with commas between them, as -1,2,5") from None
    if with_last and LAST not in chosen:
        chosen.append(LAST)
    wrong = [layer for layer in chosen if not LAST <= layer <= num_layers or chosen.count(layer) > 1]
    if wrong:
        raise ValueError(f"layer {wrong[0]} is not there or given twice: the base has -1, 0, ..., {num_layers}")
    return tuple(chosen)


def planned(names: Sequence[bytes], row_bytes: Sequence[int], shard_bytes: int) -> list[list[int]]:
    """Which rows each shard holds, the longest first: it is the same for every run. Equal rows are stored once."""
    first = {name: row for row, name in reversed(list(enumerate(names)))}
    shards: list[list[int]] = []
    size = shard_bytes
    for row in sorted(first.values(), key=lambda row: (-row_bytes[row], row)):
        if not shards or size + row_bytes[row] > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(row)
        size += row_bytes[row]
    return shards


def described(file: str) -> dict[str, object]:
    """What the manifest says of a file that was read."""
    path = Path(file).expanduser()
    if not path.is_file():
        return {"name": file}  # embedded: it is in its name
    return {"name": file, "bytes": path.stat().st_size, "modified": round(path.stat().st_mtime, 3)}


def written_before(folder: Path, manifest: Manifest, verify: bool) -> dict[str, Shard]:
    """The whole shards of an earlier run, by file name.

    Raises:
        ValueError: The folder holds another store, or something else.
    """
    if not (folder / MANIFEST).exists():
        if folder.is_dir() and any(not path.name.endswith(".new") for path in folder.iterdir()):
            raise ValueError(f"{folder} holds other files: give another --out")
        return {}
    earlier = Manifest.read(folder)
    if changed := differing(manifest, earlier):
        what, theirs, ours = changed[0], getattr(earlier, changed[0]), getattr(manifest, changed[0])
        what = {"rows": "set of conversations", "base_hash": "base"}.get(what, what)
        raise ValueError(f"{folder} holds a store of another {what} ({theirs}, not {ours}): give another --out")
    return {shard.file: shard for shard in earlier.shards if is_whole(folder / shard.file, shard, verify)}


def is_whole(path: Path, shard: Shard, verify: bool) -> bool:
    """Whether a shard is there as it was written; by its size, or by its checksum."""
    if not path.is_file() or path.stat().st_size != shard.num_bytes:
        return False
    return not verify or checksum(path) == shard.sha256


def require_room(folder: Path, num_bytes: int) -> None:
    """Raise ValueError where the disk has not as many bytes left."""
    free = shutil.disk_usage(folder_above(folder / MANIFEST)).free
    if num_bytes > free:
        raise ValueError(
            f"the store needs {human(num_bytes)} and {folder} has {human(free)} left: "
            "make room, or pass --dtype int8, fewer --layers or --limit"
        )


def human(num_bytes: float) -> str:
    """1.5 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
