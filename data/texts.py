"""Documents read from text files and from records of JSON, as strings: for drafters that learn from plain text."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

FIELDS = ("text",), ("question", "answer"), ("instruction", "input", "output"), ("instruction", "input", "response")
EXPECTED = "a field `text`, `question` and `answer`, `instruction` and `output`, or `conversations` or `messages`"


def read_texts(files: Sequence[str]) -> Iterator[str]:
    """The documents of files, one after another; empty ones are left out.

    A record is one document if it has a field `text`; of a question and answer, an instruction and output, or a
    conversation (ShareGPT or OpenAI form, or a `history` of `user` and `bot`) each part is one. Of any other file the
    paragraphs are: blank lines separate them. So nothing but the longest record or paragraph is held, and of .json the
    whole file.

    Args:
        files: .jsonl with a record a line, .json with a list of records, text of any other name; .gz is read as well.

    Raises:
        ValueError: A file is missing, not in UTF-8, or holds a record without any text; file and line are named.
    """
    for file, path in zip(files, text_paths(files), strict=True):
        kind = (path.with_suffix("") if path.suffix == ".gz" else path).suffix
        read = {".jsonl": _lines_of_records, ".json": _list_of_records}.get(kind, _paragraphs)
        yield from (text for text in read(file, path) if text.strip())


def text_paths(files: Sequence[str]) -> list[Path]:
    """Where the files are.

    Raises:
        ValueError: One is missing, or none is named.
    """
    paths = [Path(file).expanduser() for file in files]
    for file, path in zip(files, paths, strict=True):
        if not path.is_file():
            raise ValueError(f"no text file at {file}: give .txt, .jsonl or .json files (.gz is read as well)")
    if not paths:
        raise ValueError("no text file is named: give at least one")
    return paths


def _lines(file: str, path: Path) -> Iterator[tuple[str, str]]:
    """Each line with its place."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
        number = 0
        try:
            for number, line in enumerate(stream, start=1):
                yield f"{file} line {number}", line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} line {number}: not UTF-8 ({error.reason}); convert the file") from error
        except (OSError, EOFError) as error:
            raise ValueError(f"{file}: cannot be read after line {number} ({error}); fetch it again") from error


def _paragraphs(file: str, path: Path) -> Iterator[str]:
    held: list[str] = []
    for _, line in _lines(file, path):
        if line.strip():
            held.append(line)
        elif held:
            yield "".join(held)
            held = []
    yield "".join(held)


def _lines_of_records(file: str, path: Path) -> Iterator[str]:
    for place, line in _lines(file, path):
        if line.strip():
            yield from _documents(place, _decoded(file, line, place))


def _list_of_records(file: str, path: Path) -> Iterator[str]:
    records = _decoded(file, "".join(line for _, line in _lines(file, path)))
    if not isinstance(records, list):
        raise ValueError(f"{file}: expected a list of records; name it .jsonl if it has a record a line")
    for number, record in enumerate(records, start=1):
        yield from _documents(f"{file} record {number}", record)


def _decoded(file: str, text: str, place: str | None = None) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = place or f"{file} line {error.lineno}"
        raise ValueError(f"{place}: invalid JSON ({error.msg}); repair or remove it") from error


def _documents(place: str, record: object) -> Iterator[str]:
    if not isinstance(record, dict):
        raise ValueError(f"{place}: not a JSON object; expected {EXPECTED}")
    turns = record.get("conversations") or record.get("messages")
    if turns is not None:
        turns = turns if isinstance(turns, list) else [turns]
        parts = [turn.get("value", turn.get("content")) if isinstance(turn, dict) else None for turn in turns]
    else:
        names = next((names for names in FIELDS if names[0] in record and names[-1] in record), ())
        parts = [record[name] for name in names if name in record]
        if not names and isinstance(record.get("history"), list):
            pairs = [pair if isinstance(pair, dict) else {} for pair in record["history"]]
            parts = [pair.get(side) for pair in pairs for side in ("user", "bot")]
    if not parts or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{place}: no text; expected {EXPECTED}")
    for part in parts:
        if any("\ud800" <= character <= "\udfff" for character in part):
            raise ValueError(f"{place}: not valid Unicode (half of a surrogate pair); repair or remove it")
        yield part
