"""Reads the rows of a benchmark, each with its place, from JSON lines, Parquet, parallel text files or the hub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from data.benchmarks.question import Benchmark, Hub
from data.files import open_bytes, read_json_lines, reading
from data.hub import cached_if_unreachable
from data.tokenizer import first_line

ROWS_PER_READ = 16  # rows of a Parquet file that are read at a time; few, because a row may be large
Rows = Iterator[tuple[str, object]]


def split_files(files: str) -> list[str]:
    """Return the files that ``--questions`` names: one file, or several separated by commas."""
    return [files] if Path(files).expanduser().is_file() else files.split(",")


def file_rows(files: Sequence[str], parallel: Sequence[str] = ()) -> Rows:
    """Iterate over the objects of one JSONL or Parquet file, or over the lines of several parallel text files.

    Args:
        files: One JSONL file, one file whose name ends with ``.parquet``, or a text file for each field of `parallel`.
        parallel: Names of the fields, in the order of the files.

    Raises:
        ValueError: A file is missing, broken or not UTF-8, or the text files differ in length.
    """
    if len(files) == 1:
        yield from (_parquet_rows if files[0].endswith(".parquet") else _json_rows)(files[0])
        return
    columns = [_lines(file) for file in files]
    if len({len(lines) for lines in columns}) > 1:
        lengths = ", ".join(f"{file} has {len(lines)} lines" for file, lines in zip(files, columns, strict=True))
        raise ValueError(f"the files do not belong together: {lengths}")
    for number, row in enumerate(zip(*columns, strict=True), 1):
        yield f"{files[0]} line {number}", dict(zip(parallel, row, strict=True))


def hub_rows(hub: Hub, split: str, benchmark: Benchmark) -> Rows:
    """Iterate over the rows of a split on the hub, or of the file that `hub` names.

    Raises:
        ValueError: The hub cannot be reached. The message says what to download instead.
    """
    from datasets import load_dataset
    from huggingface_hub import hf_hub_download

    options = {"revision": hub.revision} if hub.revision else {}
    try:
        with cached_if_unreachable(hub.repository):
            if hub.file:
                file = hf_hub_download(hub.repository, hub.file, repo_type="dataset", revision=hub.revision)
                return _json_rows(file)
            rows = load_dataset(hub.repository, hub.configuration, split=split, **options)
    except Exception as error:  # a missing network, repository or proxy each raises its own class
        raise ValueError(
            f"cannot reach {hub.repository} on the hub; download {benchmark.download} and pass --questions FILE"
        ) from error
    return ((f"{hub.repository} row {index}", row) for index, row in enumerate(rows))


def _json_rows(file: str) -> Rows:
    return read_json_lines(_existing(file), "expected an object a line")


def _parquet_rows(file: str) -> Rows:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    path = _existing(file)
    index = 0
    try:
        with ParquetFile(path) as parquet:
            for batch in parquet.iter_batches(ROWS_PER_READ):
                for row in batch.to_pylist():
                    yield f"{file} row {index}", row
                    index += 1
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 ({error.reason}); convert the file") from error
    except (ArrowException, OSError) as error:
        raise ValueError(f"{file} is not a Parquet file that can be read ({first_line(error)})") from error


def _existing(file: str) -> Path:
    path = Path(file).expanduser()
    if path.is_dir():
        raise ValueError(f"{file} is a folder; give a file of questions in it")
    if not path.is_file():
        raise ValueError(f"{file}: no such file; give a file of questions, or several with commas between them")
    return path


def _lines(file: str) -> list[str]:
    with reading(file, "convert the file, or download it again"), open_bytes(_existing(file)) as stream:
        return stream.read().decode("utf-8-sig").removesuffix("\n").split("\n")
