"""The base's outputs that drafters train on: computed in process, or stored ahead by ``drafters features``."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.filesize import decimal
from torch import Tensor

from data.batches import collate
from data.conversations import load_conversations
from data.dtypes import Dtype
from data.features import (
    BYTES_PER_ROW,
    LAST_HIDDEN,
    MANIFEST,
    FeatureStore,
    Manifest,
    Shard,
    StoreDtype,
    bytes_per_token,
    pack_shard,
    row_keys,
    save_shard,
    stored_template,
    unpack,
)
from data.files import checksum, hash_of
from data.rows import check_tokens, describe, lengths, tokenise
from data.safe_text import safe_text
from data.templates import template_hash, with_date
from data.tokenizer import tokenizer_hash
from drafters.protocol import TrainingBatch
from inference.runs import folder_above, progress_bars
from inference.verifier.base import Base, base_hash, load_base, prepare_process, resolve_device
from inference.verifier.int8 import quantise_layers
from inference.verifier.sampling import most_probable
from train.served import ServedStates

if TYPE_CHECKING:
    from datasets import Dataset

    # Of `write_shards`, for all shards.
    ShardOptions = tuple[Path, Dataset, Sequence[int], StoreDtype, int, ServedStates | None, bool]


@torch.no_grad()
def compute_features(base: Base, layers: Sequence[int], input_ids: Tensor, loss_mask: Tensor) -> TrainingBatch:
    """Run one forward pass of the base over texts (B, S), with their loss mask (B, S).

    Autocast is switched off: the base's outputs are the same as in decoding, whatever precision the trainer uses.
    """
    with torch.autocast(input_ids.device.type, enabled=False):
        hidden, last_hidden = base.hidden_states(input_ids, layers)
        head: Any = base.model.get_output_embeddings()
        # The logits of a whole batch would not fit into memory, so they are computed one sequence at a time.
        labels = torch.stack([most_probable(head(states)) for states in last_hidden])
    return TrainingBatch(hidden, last_hidden, input_ids, labels, loss_mask)


def read_features(batch: Mapping[str, Tensor], layers: Sequence[int], dtype: torch.dtype) -> TrainingBatch:
    """Turn a batch of a feature store into the training batch that `compute_features` would lead to.

    The batch is one of `data.batches.collate`, with the stored states of the drafter's ``layers`` side by side; the
    dtype is the base's.
    """
    hidden = unpack(batch["hidden"], batch.get("hidden_scale"), dtype)
    last_hidden: Tensor | None = None  # few losses read it, so a store need not hold it
    if LAST_HIDDEN in layers:
        last_hidden = hidden.unflatten(-1, (len(layers), -1))[..., list(layers).index(LAST_HIDDEN), :]
    elif "last_hidden" in batch:
        last_hidden = unpack(batch["last_hidden"], batch.get("last_hidden_scale"), dtype)
    return TrainingBatch(hidden, last_hidden, batch["input_ids"], batch["labels"], batch["loss_mask"])


def choose_layers(store: FeatureStore, base: Base, hash_of_base: str, layers: Sequence[int]) -> None:
    """Make a store return the hidden layers that a drafter needs; the hash is `base_hash` of the base.

    Raises ValueError if the store was written by another base or with another dtype, or lacks some of the layers.
    """
    manifest, dtype = store.manifest, str(base.model.dtype).removeprefix("torch.")
    if dtype != manifest.base_dtype:
        store.refuse(f"by a base in {manifest.base_dtype}, not in {dtype}", f"--model.base_dtype {manifest.base_dtype}")
    if hash_of_base != manifest.base_hash:
        store.refuse(f"by {manifest.base}, whose weights are not those of {base.name}", "the base it was written by")
    if not set(layers) <= set(manifest.layers):
        stored, needed = ",".join(map(str, manifest.layers)), ",".join(map(str, layers))
        raise ValueError(
            f"the feature store {store.folder} holds the layers {stored}, but the drafter needs {needed}: "
            f"write one with --layers {needed}"
        )
    store.layers = tuple(layers)


# ---- drafters features


def features(
    base: str, files: list[str], out: str, template: str, max_length: int, limit: int | None, cache_dir: str | None,
    layers: str, dtype: StoreDtype, base_dtype: Dtype, device: str, devices: int, batch_size: int,
    shard_megabytes: float, served: str | None, served_layers: str,
) -> None:  # fmt: skip
    """Run `drafters features`, see `train.commands.features`."""
    folder = Path(out).expanduser()
    folder_above(folder / MANIFEST)
    if batch_size < 1 or shard_megabytes <= 0:
        raise ValueError(f"batch_size and shard_megabytes must be positive, not {batch_size} and {shard_megabytes}")
    place = resolve_device(device)
    if devices < 1 or (place.type == "cuda" and devices > torch.cuda.device_count()):
        raise ValueError(f"devices is {devices}: give at least 1, and no more than there are GPUs")
    prepare_process(place)
    in_int8 = base_dtype == "int8" and place.type == "cpu" and not served
    base_dtype = "bfloat16" if in_int8 else base_dtype  # of the base that the store is for
    loaded = load_base(base, base_dtype, "cpu" if devices > 1 or served else place, bitwise=False, movable=True)
    loaded.check_length(max_length, "max_length")
    numbers = parse_layers(layers, loaded.shape.num_layers)
    states = None
    if served:
        last = loaded.shape.num_layers
        held = parse_layers(served_layers or f"2,{last // 2},{last - 3},{last}", last)
        states = ServedStates.scan(Path(served).expanduser(), held, loaded, numbers, max_length)
    conversations, dropped = load_conversations(files, limit)
    print(safe_text(f"{len(conversations):,} conversations read, {dropped}"))
    template = with_date(template, loaded.tokenizer, stored_template(folder))
    texts = tokenise(conversations, loaded.tokenizer, template, max_length, cache_dir)
    check_tokens(texts, loaded.tokenizer, loaded.config.vocab_size)
    print(describe(texts))
    if states:
        states.check(texts)
    rows = [ShardRow(*row) for row in zip(range(len(texts)), row_keys(texts), lengths(texts), strict=True)]
    shard_bytes = int(shard_megabytes * 2**20)
    shards = divide_into_shards(rows, bytes_per_token(len(numbers), loaded.shape.hidden_size, dtype), shard_bytes)
    manifest = Manifest(
        base=base,
        base_hash=base_hash(loaded),
        base_dtype=str(loaded.model.dtype).removeprefix("torch."),
        tokenizer=tokenizer_hash(loaded.tokenizer),
        template=template_hash(template, loaded.tokenizer),
        template_name=template,
        max_length=max_length,
        layers=numbers,
        hidden_size=loaded.shape.hidden_size,
        dtype=dtype,
        rows=hash_of(row.key for shard in shards for row in shard),
        num_rows=sum(map(len, shards)),
        num_tokens=sum(row.length for shard in shards for row in shard),
        shard_bytes=shard_bytes,
        files=tuple({"name": file} for file in files),
        computed_in="int8" if in_int8 else "",
    )
    options = folder, texts, numbers, dtype, 1 if states else batch_size, states, in_int8
    if devices == 1:
        write_store(folder, manifest, shards, partial(write_shards, loaded, place, *options))
    else:
        places = [torch.device(place.type, number if place.type == "cuda" else 0) for number in range(devices)]
        write_store(folder, manifest, shards, partial(write_in_processes, places, (base, base_dtype), options))


class ShardRow(NamedTuple):
    """A tokenised conversation: its number, its key in a store (a hash of tokens and loss mask), and its length."""

    number: int
    key: bytes
    length: int


def parse_layers(layers: str, num_layers: int) -> tuple[int, ...]:
    """Return the layers to store, from text like ``-1,2,5``.

    Raises ValueError if the text is not a list of numbers, or the base has no such layer.
    """
    try:
        numbers = [int(layer) for layer in layers.split(",")]
    except ValueError:
        raise ValueError(f"layers is {layers!r}: give numbers with commas between them, as -1,2,5") from None
    if wrong := [layer for layer in numbers if not LAST_HIDDEN <= layer <= num_layers or numbers.count(layer) > 1]:
        raise ValueError(f"layer {wrong[0]} is not there or given twice: the base has -1, 0, ..., {num_layers}")
    return tuple(numbers)


def divide_into_shards(rows: Sequence[ShardRow], token_bytes: int, shard_bytes: int) -> list[list[ShardRow]]:
    """Return the rows of each shard, longest first; of equal rows only the first is stored.

    Every run with the same rows divides them in the same way. A shard is larger than ``shard_bytes`` only if a single
    row is.
    """
    first = {row.key: row for row in reversed(rows)}
    shards: list[list[ShardRow]] = []
    size = shard_bytes
    for row in sorted((row for row in rows if row is first[row.key]), key=lambda row: row.length, reverse=True):
        num_bytes = row.length * token_bytes + BYTES_PER_ROW
        if not shards or size + num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(row)
        size += num_bytes
    return shards


def write_store(
    folder: Path,
    manifest: Manifest,
    shards: Sequence[Sequence[ShardRow]],
    write: Callable[[Mapping[str, Sequence[ShardRow]]], Iterable[Shard]],
) -> None:
    """Let ``write`` write the shards that no earlier run has finished, by their file names, and write the manifest.

    Raises ValueError if the folder holds another store or other files, or the disk has no room for the shards.
    """
    finished = find_finished_shards(folder, manifest)
    planned = {f"shard-{number:05d}.safetensors": shard for number, shard in enumerate(shards)}
    missing = {name: shard for name, shard in planned.items() if name not in finished}
    print(f"{len(finished)} of {len(shards)} shards are there already" if finished else f"a new store in {folder}")
    if missing:
        num_rows = sum(map(len, missing.values()))
        num_tokens = sum(row.length for shard in missing.values() for row in shard)
        per_token = bytes_per_token(len(manifest.layers), manifest.hidden_size, manifest.dtype)
        num_bytes = num_tokens * per_token + num_rows * BYTES_PER_ROW
        if num_bytes > (free := shutil.disk_usage(folder_above(folder / MANIFEST)).free):
            raise ValueError(
                f"the store needs {decimal(num_bytes)} and {folder} has {decimal(free)} left: "
                "make room, or pass --dtype int8, fewer --layers or --limit"
            )
        print(
            f"to be written: {decimal(num_bytes)} in {len(missing)} shards of {num_rows:,} conversations, "
            f"{num_tokens:,} tokens, layers {','.join(map(str, manifest.layers))} in {manifest.dtype}",
            flush=True,
        )
        if not finished:
            manifest.save(folder)  # a folder that holds shards alone would not be continued
        with progress_bars() as bars:
            task = bars.add_task("conversations", total=num_rows)
            for shard in write(missing):
                finished[shard.file] = shard
                bars.advance(task, shard.num_rows)
                replace(manifest, shards=tuple(finished[name] for name in sorted(finished))).save(folder)
    replace(manifest, shards=tuple(finished[name] for name in planned), is_complete=True).save(folder)
    print(f"wrote {folder}: {decimal(sum(path.stat().st_size for path in folder.iterdir()))} in {len(shards)} shards")


def find_finished_shards(folder: Path, manifest: Manifest) -> dict[str, Shard]:
    """Return the shards of an earlier run that have their checksums, by file name.

    Raises ValueError if the folder holds another store, or other files.
    """
    if not (folder / MANIFEST).exists():
        if folder.is_dir() and any(not path.name.endswith(".new") for path in folder.iterdir()):
            raise ValueError(f"{folder} holds other files: give another --out")
        return {}
    earlier = Manifest.read(folder)
    if earlier.shards and (name := manifest.differing_setting(earlier)):
        earlier_value, value = (getattr(store, name) or store.base_dtype for store in (earlier, manifest))
        setting = {"rows": "set of conversations", "base_hash": "base", "computed_in": "base_dtype"}.get(name, name)
        values = f"{earlier_value}, not {value}"
        raise ValueError(f"{folder} holds a store of another {setting} ({values}): give another --out")
    return {
        shard.file: shard
        for shard in earlier.shards
        if (path := folder / shard.file).is_file() and checksum(path) == shard.sha256
    }


def write_shards(
    base: Base, device: torch.device, folder: Path, texts: Dataset, layers: Sequence[int], dtype: StoreDtype,
    batch_size: int, served: ServedStates | None, in_int8: bool, shards: Mapping[str, Sequence[ShardRow]],
) -> Iterator[Shard]:  # fmt: skip
    """Write shards, and yield each that is complete. While one is written to the disk, the base computes the next.

    With ``in_int8``, the layers of a base on the CPU are quantised first (`inference.verifier.int8`).
    """
    compute: Callable[..., TrainingBatch] = served.compute if served else compute_features
    if served:
        decoder: Any = base.model.base_model
        decoder.layers = None  # neither moved nor run; texts come one at a time
    base.move_to(device)
    if in_int8:
        quantise_layers(base.model)

    def rows_of(shard: Sequence[ShardRow]) -> Iterator[dict[str, Any]]:
        for start in range(0, len(shard), batch_size):
            conversations = [texts[row.number] for row in shard[start : start + batch_size]]
            padded = collate(conversations)
            batch = compute(base, layers, padded["input_ids"].to(device), padded["loss_mask"])
            for place, (conversation, length) in enumerate(zip(conversations, padded["lengths"].tolist(), strict=True)):
                yield {
                    "id": conversation["id"],
                    "input_ids": batch.input_ids[place, :length],
                    "loss_mask": batch.loss_mask[place, :length],
                    "hidden": batch.hidden[place, :length],
                    "labels": batch.labels[place, :length],
                }

    with ThreadPoolExecutor(1) as pool:
        saving: list[Future[Shard]] = []
        for name, shard in shards.items():
            # In this thread: glibc gives back the large blocks of others, and the system fills new ones with zeros.
            data = pack_shard([row.key for row in shard], rows_of(shard), layers, dtype)
            yield from (earlier.result() for earlier in saving)
            saving = [pool.submit(save_shard, folder / name, data)]
        yield from (last.result() for last in saving)


def write_in_processes(
    devices: Sequence[torch.device], source: tuple[str, Dtype], options: ShardOptions,
    shards: Mapping[str, Sequence[ShardRow]],
) -> Iterator[Shard]:  # fmt: skip
    """Write shards as `write_shards` with these options, in a process for each device that loads the base itself."""
    context, parts = get_context("spawn"), [[*shards.items()][first :: len(devices)] for first in range(len(devices))]
    results = context.Queue()
    processes = [
        context.Process(target=_write_part, args=(results, device, source, options, dict(part)), daemon=True)
        for device, part in zip(devices, parts, strict=True)
    ]
    for process in processes:
        process.start()
    for _ in shards:
        while results.empty():
            if any(process.exitcode for process in processes):
                raise ValueError("a process has failed or was killed: run again, finished shards are kept")
            sleep(0.05)
        if isinstance(result := results.get(), ValueError):
            raise result
        yield result


def _write_part(results: Any, device: torch.device, source: tuple, options: ShardOptions, shards: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the first process, which ends this one
    prepare_process(device)
    try:
        base = load_base(source[0], source[1], device, bitwise=False, movable=True)
        for shard in write_shards(base, device, *options, shards):
            results.put(shard)
    except ValueError as error:
        results.put(error)
