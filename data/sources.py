"""Reads rows from JSON and parquet files, from the hub or from the embedded corpus, and documents of plain text."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from data.files import cause_of, open_bytes, parse_line, read_json, reading
from data.tokenizer import cached_if_unreachable

Rows = Iterator[tuple[str, object]]

ROWS_PER_READ = 64  # rows of a parquet file or of the hub that are held in memory at a time
AGAIN = "fetch the file again"
HUB = re.compile(
    r"hub:(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>refs/convert/parquet|[\w.-]+))?"
    r"(/(?P<file>[^:]+)|(:(?P<config>[^:/]+))?:(?P<split>[^:/]+))?"
)
# The fields of a record whose parts are documents of their own.
PARTS = ("text",), ("question", "answer"), ("instruction", "input", "output"), ("instruction", "input", "response")
EXPECTED = "a field `text`, `question` and `answer`, `instruction` and `output`, or `conversations` or `messages`"


def read_rows(source: str, columns: Collection[str] = ()) -> Rows:
    """Yield the place of each row, such as ``line 3``, and the row, or a ValueError that says why it is broken.

    A file of JSON lines is read line by line, parquet files and the hub `ROWS_PER_READ` rows at a time, a .json file,
    which holds a list or an object with one list, at once. Raises ValueError if the source as a whole cannot be read.

    Args:
        source: Path of a .json, .parquet or JSON lines file (.json and JSON lines also as .gz);
            `hub:OWNER/NAME[@REVISION][[:CONFIG]:SPLIT]` for a data set on the Hugging Face hub, split `train` by
            default; `hub:OWNER/NAME[@REVISION]/FILE` for one file of a data set; or `embedded[:COUNT[:SEED]]` for the
            project's own corpus. The hub is used only for names with `hub:`.
        columns: Columns of a table to read; by default all.
    """
    if source.startswith("hub:"):
        return _read_hub(source, columns)
    if source.split(":")[0] == "embedded":
        return _read_embedded(source)
    path = Path(source).expanduser()
    if not path.is_file():
        hub = f"; for a data set of the hub write hub:{source}" if source.count("/") == 1 and not path.suffix else ""
        problem = "a folder; give the files in it" if path.is_dir() else "no such file; give the path of one"
        raise ValueError(f"{source}: {problem}, .json, .jsonl (also .gz) or .parquet{hub}")
    return _read_file(source, path, columns)


def _read_embedded(source: str) -> Rows:
    from data import embedded

    numbers = source.split(":")[1:]
    if len(numbers) > 2 or not all(number.isdigit() for number in numbers):
        raise ValueError(
            f"{source}: expected embedded, embedded:COUNT or embedded:COUNT:SEED, for example embedded:4000:0"
        )
    count, seed = [*map(int, numbers), *(4000, 0)[len(numbers) :]]
    return _numbered(embedded.conversations(count, seed))


def _read_hub(source: str, columns: Collection[str]) -> Rows:
    from datasets import load_dataset
    from huggingface_hub import hf_hub_download

    match = HUB.fullmatch(source)
    if match is None:
        raise ValueError(f"{source}: expected hub:OWNER/NAME[@REVISION][[:CONFIG]:SPLIT] or hub:OWNER/NAME/FILE")
    name, file, split = match["name"], match["file"], match["split"] or "train"
    options: dict[str, Any] = {"revision": match["revision"]} if match["revision"] else {}
    try:
        with cached_if_unreachable(name, "README.md", "dataset"):
            if file:
                path = Path(hf_hub_download(name, file, repo_type="dataset", **options))
            else:
                rows = load_dataset(name, match["config"], split=split, **options).with_format("arrow")
    except Exception as error:  # a missing connection, data set, file, split or permission each raises its own class
        raise ValueError(
            f"{source}: cannot be loaded from the hub ({cause_of(error)}); check the name, go online, or give a file"
        ) from error
    if file:
        return _read_file(source, path, columns)
    tables = rows.select_columns(_chosen(source, rows.column_names, columns)).iter(ROWS_PER_READ)
    return _numbered(row for table in tables for row in table.to_pylist())


def _read_file(source: str, path: Path, columns: Collection[str] = ()) -> Rows:
    kind = kind_of(path)
    if kind == ".parquet":
        return _numbered(_parquet_rows(source, path, columns))
    return _numbered(_listed_rows(source, path)) if kind == ".json" else _json_lines(source, path)


def kind_of(path: Path) -> str:
    """Return the suffix of a file, without .gz."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix


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


def _parquet_rows(source: str, path: Path, columns: Collection[str]) -> Iterator[object]:
    from pyarrow.parquet import ParquetFile

    with reading(source, AGAIN), ParquetFile(path) as file:
        for batch in file.iter_batches(ROWS_PER_READ, columns=_chosen(source, file.schema_arrow.names, columns)):
            yield from batch.to_pylist()


def _chosen(source: str, names: Sequence[str], columns: Collection[str]) -> list[str]:
    chosen = [name for name in names if not columns or name in columns]
    if not chosen:
        raise ValueError(f"{source}: none of its columns ({', '.join(names)}) is one of {', '.join(sorted(columns))}")
    return chosen


def _numbered(records: Iterable[object]) -> Rows:
    return ((f"record {number}", record) for number, record in enumerate(records, 1))


def read_texts(files: Sequence[str]) -> Iterator[str]:
    """Yield the documents of files in order, skipping empty ones, for drafters that index plain text.

    In .jsonl, .json or .parquet files, a record with a field ``text`` is one document. In any other record, each part
    is one: the question and the answer, the instruction, the input and the output, or each turn of a conversation
    (ShareGPT or OpenAI form, or a ``history`` of ``user`` and ``bot``). In files with other names, which are text, the
    documents are the paragraphs, separated by blank lines. Raises ValueError with the place of what cannot be read.
    """
    for file, path in zip(files, text_paths(files), strict=True):
        is_text = kind_of(path) not in (".jsonl", ".json", ".parquet")
        rows = () if is_text else _read_file(file, path)
        documents = _paragraphs(file, path) if is_text else (text for row in rows for text in _documents(file, *row))
        yield from (text for text in documents if text.strip())


def text_paths(files: Sequence[str]) -> list[Path]:
    """Return the paths of the files, or raise ValueError if one is missing or none is named."""
    paths = [Path(file).expanduser() for file in files]
    missing = [f" at {file}" for file, path in zip(files, paths, strict=True) if not path.is_file()]
    if missing or not files:
        place = missing[0] if missing else ""
        raise ValueError(f"no text file{place}: give .txt, .jsonl, .json or .parquet files (.gz is read as well)")
    return paths


def _paragraphs(file: str, path: Path) -> Iterator[str]:
    paragraph: list[str] = []
    with reading(file, AGAIN), open_bytes(path) as stream:
        for number, line in enumerate(stream, start=1):
            with reading(f"{file} line {number}", "convert the file"):
                text = line.decode("utf-8")
            if text.strip():
                paragraph.append(text)
            else:
                yield "".join(paragraph)
                paragraph = []
        yield "".join(paragraph)


def _documents(file: str, place: str, record: object) -> Iterator[str]:
    if isinstance(record, ValueError):
        raise ValueError(f"{file} {place}: {record}; repair or remove it") from record
    record = record if isinstance(record, dict) else {}
    turns, history = record.get("conversations") or record.get("messages"), record.get("history")
    names = next((names for names in PARTS if names[0] in record and names[-1] in record), ())
    parts = [record[name] for name in names if record.get(name) is not None]
    if isinstance(turns, list):
        parts = [turn.get("value", turn.get("content")) if isinstance(turn, dict) else None for turn in turns]
    elif not names and isinstance(history, list):
        parts = [pair.get(side) for pair in history if isinstance(pair, dict) for side in ("user", "bot")]
    if not parts or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{file} {place}: no text; expected {EXPECTED}")
    yield from parts
