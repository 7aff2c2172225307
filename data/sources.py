"""Reads records of conversations from JSON, JSON lines and parquet files, from the hub, or from the embedded corpus."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from data.files import cause_of, open_bytes, read_json, reading
from data.hub import cached_if_unreachable
from data.tokenizer import first_line

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Table

KINDS = ".json, .jsonl (also .gz) or .parquet"
FORMS = (
    *(("conversations",), ("conversation",), ("messages",), ("question", "answer")),
    *(("instruction", "output"), ("instruction", "response"), ("history",)),
)
# The columns that `parse` reads.
COLUMNS = {"id", "input", "input_ids", "loss_mask", "tokenizer", "template", "tools"}.union(*FORMS)
ROWS_PER_READ = 256  # rows of a parquet file or of the hub that are held in memory at a time


def read_records(source: str) -> Iterator[tuple[str, object]]:
    """Yield the place of each record, such as ``line 3``, and the record, or a ValueError that says why it is broken.

    A .jsonl file is read line by line, parquet files and the hub `ROWS_PER_READ` rows at a time, a .json file at once.

    Args:
        source: Path of a .json or .jsonl (also .gz) or .parquet file; `hub:OWNER/NAME[[:CONFIG]:SPLIT]` for a data set
            on the Hugging Face hub, split `train` by default; `hub:OWNER/NAME/FILE` for one file of a data set; or
            `embedded[:COUNT[:SEED]]` for the project's own corpus. The hub is used only for names with `hub:`.

    Raises:
        ValueError: The source as a whole cannot be read.
    """
    if source.startswith("hub:"):
        return _read_hub(source)
    if source.split(":")[0] == "embedded":
        return _read_embedded(source)
    return _read_file(source, _regular_file(source))


def _read_embedded(source: str) -> Iterator[tuple[str, object]]:
    from data import embedded

    numbers = source.split(":")[1:]
    if len(numbers) > 2 or not all(number.isdigit() for number in numbers):
        raise ValueError(
            f"{source}: expected embedded, embedded:COUNT or embedded:COUNT:SEED, for example embedded:4000:0"
        )
    size, seed = [*map(int, numbers), *[4000, 0][len(numbers) :]]
    return _numbered(embedded.conversations(size, seed))


def _read_hub(source: str) -> Iterator[tuple[str, object]]:
    from datasets import load_dataset
    from huggingface_hub import hf_hub_download

    name, *chosen = source.removeprefix("hub:").split(":")
    owner, *parts = name.split("/")
    if not parts or not all([owner, *parts, *chosen]) or len(chosen) > (2 if len(parts) == 1 else 0):
        raise ValueError(
            f"{source}: expected hub:OWNER/NAME, hub:OWNER/NAME:SPLIT, hub:OWNER/NAME:CONFIG:SPLIT or "
            "hub:OWNER/NAME/FILE"
        )
    *config, split = chosen or ["train"]
    try:
        with cached_if_unreachable(f"{owner}/{parts[0]}"):
            if len(parts) == 1:
                rows = load_dataset(name, *config, split=split).with_format("arrow")
            else:
                path = Path(hf_hub_download(f"{owner}/{parts[0]}", "/".join(parts[1:]), repo_type="dataset"))
    except Exception as error:  # a missing connection, data set, file, split or permission each raises its own class
        raise ValueError(
            f"{source}: cannot be loaded from the hub ({first_line(error)}); check the name, go online, or give a file"
        ) from error
    if len(parts) > 1:
        return _read_file(source, path)
    return _read_tables(source, rows.column_names, lambda columns: rows.select_columns(columns).iter(ROWS_PER_READ))


def _regular_file(source: str) -> Path:
    path = Path(os.path.expanduser(source))
    if path.is_file():
        return path
    hub = f"; for a data set of the hub write hub:{source}" if source.count("/") == 1 and not path.suffix else ""
    problem = "a folder" if path.is_dir() else "no such file"
    advice = (
        f"give the files in it, {KINDS}" if path.is_dir() else f"give the path of a {KINDS} file, or `embedded`{hub}"
    )
    raise ValueError(f"{source}: {problem}; {advice}")


def _read_file(source: str, path: Path) -> Iterator[tuple[str, object]]:
    kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if kind == ".jsonl":
        return _read_lines(source, path)
    if kind == ".json":
        return _numbered(_read_list(source, path))
    if path.suffix == ".parquet":
        return _read_parquet(source, path)
    raise ValueError(f"{source}: unknown kind of file; convert it to {KINDS}")


def _read_lines(source: str, path: Path) -> Iterator[tuple[str, object]]:
    number = 0
    with reading(source, "fetch the file again"), open_bytes(path) as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield f"line {number}", _decoded(line)
        if number == 0:
            raise ValueError("the file is empty")


def _decoded(line: bytes) -> object:
    try:
        return json.loads(line.strip().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return ValueError(cause_of(error))


def _read_list(source: str, path: Path) -> list[object]:
    value = read_json(path, "fetch it again, or name it .jsonl if it has a record a line")
    lists = [value] if isinstance(value, list) else []
    if isinstance(value, dict):
        lists = [entry for entry in value.values() if isinstance(entry, list)]
    if len(lists) != 1:
        raise ValueError(f"{source}: expected a list of conversations, or an object that holds one list")
    return lists[0]


def _read_parquet(source: str, path: Path) -> Iterator[tuple[str, object]]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            names = file.schema_arrow.names
            yield from _read_tables(source, names, lambda columns: file.iter_batches(ROWS_PER_READ, columns=columns))
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{source}: cannot be read as parquet ({first_line(error)}); fetch the file again") from error


def _read_tables(
    source: str, names: list[str], read: Callable[[list[str]], Iterable[RecordBatch | Table]]
) -> Iterator[tuple[str, object]]:
    if not any(set(form) <= set(names) for form in FORMS):
        expected = ", ".join(" and ".join(form) for form in FORMS)
        raise ValueError(f"{source}: none of its columns ({', '.join(names)}) holds conversations; expected {expected}")
    tables = read([name for name in names if name in COLUMNS])
    return _numbered(_row(table.slice(row, 1)) for table in tables for row in range(table.num_rows))


def _row(table: RecordBatch | Table) -> object:
    try:
        return table.to_pylist()[0]
    except UnicodeDecodeError as error:
        return ValueError(f"not UTF-8 ({error.reason})")


def _numbered(records: Iterable[object]) -> Iterator[tuple[str, object]]:
    return ((f"record {number}", record) for number, record in enumerate(records, 1))
