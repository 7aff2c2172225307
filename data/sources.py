"""Records of conversations, one after another: from files of JSON, JSON lines and parquet, from the hub, or our own."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from data.tokenizer import first_line

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Table

MOST_BYTES = 1 << 24  # of one line: a longer one is no conversation, and is not held in memory
KINDS = ".json, .jsonl (also .gz) or .parquet"
FORMS = (
    *(("conversations",), ("conversation",), ("messages",), ("question", "answer")),
    *(("instruction", "output"), ("instruction", "response"), ("history",)),
)
COLUMNS = {"id", "input", "input_ids", "loss_mask", "tokenizer", "template"}.union(*FORMS)  # those `parse` reads
NUM_ROWS = 256  # of parquet or the hub that are held at a time
UNREADABLE = (OSError, EOFError, zlib.error)


def records(source: str) -> Iterator[tuple[str, object]]:
    """Yield each record with its place in the source, as `line 3`; a broken one is the ValueError that says why.

    Of a .jsonl file one line is held at a time, of .parquet and the hub some rows, of .json the whole file.

    Args:
        source: path of a .json or .jsonl (also .gz) or .parquet file; `hub:OWNER/NAME[[:CONFIG]:SPLIT]` for a data set
            of the Hugging Face hub, by default its split `train`; `hub:OWNER/NAME/FILE` for one file of it; or
            `embedded[:COUNT[:SEED]]` for the project's own corpus. Without `hub:` nothing is looked for on the hub.

    Raises:
        ValueError: the source as a whole cannot be read.
    """
    if source.startswith("hub:"):
        return _of_hub(source)
    if source.split(":")[0] == "embedded":
        return _of_embedded(source)
    return _of_file(source, _regular_file(source))


def _of_embedded(source: str) -> Iterator[tuple[str, object]]:
    from data import embedded

    numbers = source.split(":")[1:]
    if len(numbers) > 2 or not all(number.isdigit() for number in numbers):
        raise ValueError(
            f"{source}: expected embedded, embedded:COUNT or embedded:COUNT:SEED, for example embedded:4000:0"
        )
    size, seed = [*map(int, numbers), *[4000, 0][len(numbers) :]]
    return _numbered(embedded.conversations(size, seed))


def _of_hub(source: str) -> Iterator[tuple[str, object]]:
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
        if len(parts) == 1:
            rows = load_dataset(name, *config, split=split).with_format("arrow")
        else:
            path = Path(hf_hub_download(f"{owner}/{parts[0]}", "/".join(parts[1:]), repo_type="dataset"))
    except Exception as error:  # no connection, no such set, file, config or split, no right to it: of many classes
        raise ValueError(
            f"{source}: cannot be had from the hub ({first_line(error)}); look at its name, go online, or give a file"
        ) from error
    if len(parts) > 1:
        return _of_file(source, path)
    return _of_tables(source, rows.column_names, lambda columns: rows.select_columns(columns).iter(NUM_ROWS))


def _regular_file(source: str) -> Path:
    path = Path(os.path.expanduser(source))
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        if os.path.islink(path):
            raise ValueError(f"{source}: a link to {os.readlink(path)}, where no file is; mend the link") from error
        hub = f"; for a data set of the hub write hub:{source}" if source.count("/") == 1 and not path.suffix else ""
        raise ValueError(f"{source}: no such file; give the path of a {KINDS} file, or `embedded`{hub}") from error
    if stat.S_ISDIR(mode):
        raise ValueError(f"{source}: a folder; give the files in it, {KINDS}")
    if not stat.S_ISREG(mode):
        raise ValueError(f"{source}: not a regular file; write what it gives to a file first")
    return path


def _of_file(source: str, path: Path) -> Iterator[tuple[str, object]]:
    kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if kind == ".jsonl":
        return _of_lines(source, path)
    if kind == ".json":
        return _numbered(_listed(source, path))
    if path.suffix == ".parquet":
        return _of_parquet(source, path)
    raise ValueError(f"{source}: unknown kind of file; convert it to {KINDS}")


def _opened(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _of_lines(source: str, path: Path) -> Iterator[tuple[str, object]]:
    number = 0
    try:
        with _opened(path) as stream:
            for number in count(1):
                line = stream.readline(MOST_BYTES + 1)
                if not line:
                    break
                is_long = len(line) > MOST_BYTES
                while len(line) > MOST_BYTES and not line.endswith(b"\n"):
                    line = stream.readline(MOST_BYTES + 1)
                if is_long:
                    yield f"line {number}", ValueError(f"a line of more than {MOST_BYTES >> 20} MiB")
                elif line.strip():
                    yield f"line {number}", _decoded(line)
    except UNREADABLE as error:
        raise ValueError(f"{source}: cannot be read from line {number} on ({error}); fetch the file again") from error
    if number == 1:
        raise ValueError(f"{source}: the file is empty; fetch it again")


def _decoded(line: bytes) -> object:
    try:
        return JSON.decode(line.removeprefix(codecs.BOM_UTF8).decode("utf-8").strip())
    except UnicodeDecodeError as error:
        return ValueError(f"not UTF-8 ({error.reason})")
    except json.JSONDecodeError as error:
        return ValueError(f"invalid JSON ({error.msg})")
    except RecursionError:
        return ValueError("invalid JSON (nested too deeply)")
    except ValueError:
        return ValueError("invalid JSON (a number of thousands of digits)")  # Python reads at most 4300


def _listed(source: str, path: Path) -> list[object]:
    try:
        with _opened(path) as stream:
            data = stream.read()
    except UNREADABLE as error:
        raise ValueError(f"{source}: cannot be read ({error}); fetch the file again") from error
    if not data.strip():
        raise ValueError(f"{source}: the file is empty; fetch it again")
    try:
        value = JSON.decode(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{source} line {line}: not UTF-8 ({error.reason}); convert the file to UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{source} line {error.lineno}: invalid JSON ({error.msg}); "
            "fetch it again, or name it .jsonl if it has a record a line"
        ) from error
    except (RecursionError, ValueError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else "a number of thousands of digits"
        raise ValueError(f"{source}: invalid JSON ({problem}); fetch it again, or remove that record") from error
    if isinstance(value, ValueError):
        raise ValueError(f"{source}: {value}; fetch it again")
    lists = [value] if isinstance(value, list) else []
    if isinstance(value, dict):
        lists = [entry for entry in value.values() if isinstance(entry, list)]
    if len(lists) != 1:
        raise ValueError(f"{source}: expected a list of conversations, or an object that holds one list")
    return lists[0]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | ValueError:
    """A JSON object. Of two values of one key Python keeps the last: half of the record would be lost in silence."""
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    keys = [key for key, _ in pairs]
    return ValueError(f"the key {max(keys, key=keys.count)[:40]!r} stands twice in one object")


JSON = json.JSONDecoder(object_pairs_hook=_object)


def _of_parquet(source: str, path: Path) -> Iterator[tuple[str, object]]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            names = file.schema_arrow.names
            yield from _of_tables(source, names, lambda columns: file.iter_batches(NUM_ROWS, columns=columns))
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{source}: cannot be read as parquet ({first_line(error)}); fetch the file again") from error


def _of_tables(
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


def _numbered(found: Iterable[object]) -> Iterator[tuple[str, object]]:
    return ((f"record {number}", record) for number, record in enumerate(found, 1))
