"""Reads documents from text, JSON and JSON lines files, for drafters that index plain text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from data.files import cause_of, open_bytes, reading

FIELDS = ("text",), ("question", "answer"), ("instruction", "input", "output"), ("instruction", "input", "response")
EXPECTED = "a field `text`, `question` and `answer`, `instruction` and `output`, or `conversations` or `messages`"


def read_texts(files: Sequence[str]) -> Iterator[str]:
    """Yield the documents of the files in order, skipping empty ones.

    A JSON record with a field ``text`` is one document. In any other record, each part is a document: the question and
    the answer, the instruction, the input and the output, or each turn of a conversation (ShareGPT or OpenAI form, or a
    ``history`` of ``user`` and ``bot``). In a text file the documents are the paragraphs, separated by blank lines.
    Only one record or paragraph is held in memory at a time, except that .json files are read whole.

    Args:
        files: .jsonl files with one record per line, .json files with a list of records, or text files under any other
            name. Each may be compressed (.gz).

    Raises:
        ValueError: A file is missing, is not UTF-8, or holds a record without text. The message names the place.
    """
    for file, path in zip(files, text_paths(files), strict=True):
        kind = (path.with_suffix("") if path.suffix == ".gz" else path).suffix
        read = {".jsonl": _lines_of_records, ".json": _list_of_records}.get(kind, _paragraphs)
        yield from (text for text in read(file, path) if text.strip())


def text_paths(files: Sequence[str]) -> list[Path]:
    """Return the paths of the files.

    Raises:
        ValueError: A file is missing, or no file is named.
    """
    paths = [Path(file).expanduser() for file in files]
    for file, path in zip(files, paths, strict=True):
        if not path.is_file():
            raise ValueError(f"no text file at {file}: give .txt, .jsonl or .json files (.gz is read as well)")
    if not paths:
        raise ValueError("no text file is named: give at least one")
    return paths


def _lines(file: str, path: Path) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each line, which may be as long as the file."""
    with reading(file, "fetch it again"), open_bytes(path) as stream:
        for number, line in enumerate(stream, start=1):
            with reading(f"{file} line {number}", "convert the file"):
                text = line.decode("utf-8")
            yield f"{file} line {number}", text


def _paragraphs(file: str, path: Path) -> Iterator[str]:
    paragraph: list[str] = []
    for _, line in _lines(file, path):
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield "".join(paragraph)
            paragraph = []
    yield "".join(paragraph)


def _lines_of_records(file: str, path: Path) -> Iterator[str]:
    for place, line in _lines(file, path):
        if line.strip():
            yield from _documents(place, _decoded(file, line.strip(), place))


def _list_of_records(file: str, path: Path) -> Iterator[str]:
    records = _decoded(file, "".join(line for _, line in _lines(file, path)))
    if not isinstance(records, list):
        raise ValueError(f"{file}: expected a list of records; name it .jsonl if it has a record a line")
    for number, record in enumerate(records, start=1):
        yield from _documents(f"{file} record {number}", record)


def _decoded(file: str, text: str, place: str | None = None) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        place = place or (f"{file} line {error.lineno}" if isinstance(error, json.JSONDecodeError) else file)
        raise ValueError(f"{place}: {cause_of(error)}; repair or remove it") from error


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
    texts = [part for part in parts if isinstance(part, str)]
    if not texts or len(texts) < len(parts):
        raise ValueError(f"{place}: no text; expected {EXPECTED}")
    for part in texts:
        if any("\ud800" <= character <= "\udfff" for character in part):
            raise ValueError(f"{place}: not valid Unicode (half of a surrogate pair); repair or remove it")
        yield part
