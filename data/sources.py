"""Reads rows from JSON and parquet files, from the hub or from the embedded corpus, and documents of plain text."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from data.files import cause_of, open_bytes, parse_line, read_json, reading
from data.hub import cached_if_unreachable

Rows = Iterator[tuple[str, object]]

EMBEDDED = Path(__file__).with_name("embedded.jsonl.gz")  # written by benchmarks.pretrain
NUM_EMBEDDED = 4000  # conversations in it
ROWS_PER_READ = 64  # rows of a parquet file or of the hub that are held in memory at a time
AGAIN = "fetch the file again"
HUB = re.compile(
    r"hub:(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>refs/convert/parquet|[\w.-]+))?"
    r"(/(?P<file>[^:]+)|(:(?P<config>[^:/]+))?:(?P<split>[^:/]+))?"
)


def read_rows(source: str) -> Rows:
    """Yield the place of each row, such as ``line 3``, and the row, or a ValueError that says why it is broken.

    A file of JSON lines is read line by line, parquet files and the hub `ROWS_PER_READ` rows at a time, a .json file,
    which holds a list or an object with one list, at once. Raises ValueError if the source as a whole cannot be read.

    Args:
        source: Path of a .json, .parquet or JSON lines file (.json and JSON lines also as .gz);
            `hub:OWNER/NAME[@REVISION][[:CONFIG]:SPLIT]` for a data set on the Hugging Face hub, split `train` by
            default; `hub:OWNER/NAME[@REVISION]/FILE` for one file of a data set; or `embedded[:COUNT[:FIRST]]` for the
            project's own corpus, from its conversation FIRST on. The hub is used only for names with `hub:`.
    """
    if source.startswith("hub:"):
        return _read_hub(source)
    if source.split(":")[0] == "embedded":
        return _read_embedded(source)
    path = Path(source).expanduser()
    if not path.is_file():
        hub = f"; for a data set of the hub write hub:{source}" if source.count("/") == 1 and not path.suffix else ""
        problem = "a folder; give the files in it" if path.is_dir() else "no such file; give the path of one"
        raise ValueError(f"{source}: {problem}, .json, .jsonl (also .gz) or .parquet{hub}")
    return _read_file(source, path)


def _read_embedded(source: str) -> Rows:
    numbers = source.split(":")[1:]
    if len(numbers) > 2 or not all(number.isdigit() for number in numbers):
        raise ValueError(f"{source}: expected embedded, embedded:COUNT or embedded:COUNT:FIRST, such as embedded:500:0")
    count, first = [*map(int, numbers), *(NUM_EMBEDDED, 0)[len(numbers) :]]
    if first + count > NUM_EMBEDDED:
        raise ValueError(f"{source}: the project's own corpus has {NUM_EMBEDDED:,} conversations, from number 0 on")
    return islice(_json_lines(source, EMBEDDED), first, first + count)


def _read_hub(source: str) -> Rows:
    from datasets import load_dataset
    from huggingface_hub import hf_hub_download

    match = HUB.fullmatch(source)
    if match is None:
        raise ValueError(f"{source}: expected hub:OWNER/NAME[@REVISION][[:CONFIG]:SPLIT] or hub:OWNER/NAME/FILE")
    name, file, split = match["name"], match["file"], match["split"] or "train"
    try:
        with cached_if_unreachable(name, "README.md", "dataset"):
            if file:
                path = Path(hf_hub_download(name, file, repo_type="dataset", revision=match["revision"]))
            else:
                rows = load_dataset(name, match["config"], split=split, revision=match["revision"]).with_format("arrow")
    except Exception as error:  # a missing connection, data set, file, split or permission each raises its own class
        raise ValueError(
            f"{source}: cannot be loaded from the hub ({cause_of(error)}); check the name, go online, or give a file"
        ) from error
    if file:
        return _read_file(source, path)
    return _numbered(row for table in rows.iter(ROWS_PER_READ) for row in _rows_of(table))


def _read_file(source: str, path: Path) -> Rows:
    kind = kind_of(path)
    if kind == ".parquet":
        return _numbered(_parquet_rows(source, path))
    return _numbered(_listed_rows(source, path)) if kind == ".json" else _json_lines(source, path)


def kind_of(path: Path) -> str:
    """Return the suffix of a file in small letters, without .gz."""
    return (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()


def _json_lines(source: str, path: Path) -> Rows:
    number = 0
    with reading(source, AGAIN), open_bytes(path) as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                try:
                    row = parse_line(line)
                except ValueError as error:
                    row = error
                yield f"line {number}", row
        if number == 0:
            raise ValueError("the file is empty")


def _listed_rows(source: str, path: Path) -> list[object]:
    value = read_json(path, f"{AGAIN}, or name it .jsonl if it has a record a line")
    lists = [value] if isinstance(value, list) else []
    if isinstance(value, dict):
        lists = [entry for entry in value.values() if isinstance(entry, list)]
    if len(lists) != 1:
        raise ValueError(f"{source}: expected a list of records, or an object that holds one list")
    return lists[0]


def _parquet_rows(source: str, path: Path) -> Iterator[object]:
    from pyarrow.parquet import ParquetFile

    with reading(source, AGAIN), ParquetFile(path) as file:
        for batch in file.iter_batches(ROWS_PER_READ):
            yield from _rows_of(batch)


def _rows_of(table: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of an Arrow table, with the values of JSON columns, which it holds as texts."""
    kinds = {column.name: column.type for column in table.schema if "arrow.json" in str(column.type)}
    for row in table.to_pylist():
        yield row | {name: _decoded(row[name], kind) for name, kind in kinds.items()}


def _decoded(value: Any, kind: Any) -> Any:
    """Return a value of an Arrow table with its JSON texts, at any depth of the table's types, decoded."""
    if value is None or "arrow.json" not in str(kind):
        return value
    if getattr(kind, "extension_name", "") == "arrow.json":
        return json.loads(value)
    if isinstance(value, dict):
        return {entry.name: _decoded(value[entry.name], entry.type) for entry in kind}
    return [_decoded(entry, kind.value_type) for entry in value]


def _numbered(records: Iterable[object]) -> Rows:
    return ((f"record {number}", record) for number, record in enumerate(records, 1))


def is_text(path: Path) -> bool:
    """Whether a file holds plain text and no records."""
    return kind_of(path) not in (".jsonl", ".ndjson", ".json", ".parquet")


def text_paths(files: Sequence[str]) -> list[Path]:
    """Return the paths of the files, or raise ValueError if one is missing or none is named."""
    paths = [Path(file).expanduser() for file in files]
    missing = [f" at {file}" for file, path in zip(files, paths, strict=True) if not path.is_file()]
    if missing or not files:
        place = missing[0] if missing else ""
        raise ValueError(f"no text file{place}: give .txt, .jsonl, .json or .parquet files (.gz is read as well)")
    return paths


def paragraphs(file: str, path: Path) -> Iterator[str]:
    """Yield the parts of a text that blank lines separate, which may be empty."""
    paragraph: list[str] = []
    with reading(file, AGAIN), open_bytes(path) as stream:
        for number, line in enumerate(stream, start=1):
            with reading(f"{file} line {number}", "convert the file"):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").replace("\r\n", "\n")
            if text.strip():
                paragraph.append(text)
            else:
                yield "".join(paragraph)
                paragraph = []
        yield "".join(paragraph)
