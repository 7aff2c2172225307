"""Append-only JSONL journal that lets an interrupted run continue."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from data.files import atomic_write, disk_errors, parse_line, reading

T = TypeVar("T")


def recorded_settings(path: Path) -> dict[str, Any]:
    """The settings in a journal's file; none if there is no such file, or `Journal` will refuse it."""
    with suppress(OSError, ValueError), path.open("rb") as stream:
        settings = parse_line(next(stream, b"{}"))
        return settings if isinstance(settings, dict) else {}
    return {}


class Journal:
    """The results of a long run, one JSON value per line, behind a first line with the settings of the run, if any.

    Opening or reading a journal never changes its file. The first `append` creates or replaces the file, at once with
    its entry, or cuts off a last line that an interruption left incomplete.

    Args:
        path: The journal's file; it need not exist yet.
        settings: Everything that the results depend on, as JSON values; None for a file without that line.
        is_replaced: Whether entries under other settings are dropped; if not, they raise ValueError.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any] | None = None, is_replaced: bool = False) -> None:
        self.path = Path(path)
        self.settings = json.loads(json.dumps(settings))  # as they are read back: tuples are lists
        self._stream: FileIO | None = None  # opened by the first append
        self._is_kept = True
        recorded = next((self._parsed(1, line) for line in self._lines()), None) if settings is not None else None
        self._is_kept = recorded in (None, self.settings)
        if not (self._is_kept or is_replaced):
            raise ValueError(
                f"{path} was started with {_differences(recorded, self.settings)}: repeat that command to continue "
                "it, pass --overwrite to start over, or choose another --out"
            )

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Any]:
        """The entries, without the settings."""
        return self.entries(lambda entry: entry)

    def entries(self, read: Callable[[Any], T]) -> Iterator[T]:
        """What ``read`` makes of each entry, without the settings; raises ValueError if it cannot read one."""
        for number, line in islice(enumerate(self._lines(), start=1), int(self.settings is not None), None):
            yield self._parsed(number, line, read)

    def append(self, entry: Any) -> None:
        """Add an entry; it is on the disk when this returns."""
        first, line = (json.dumps(value, separators=(",", ":")).encode() + b"\n" for value in (self.settings, entry))
        first = first if self.settings is not None else b""
        if self._stream is None:
            if not (size := sum(map(len, self._lines()))):
                with atomic_write(self.path) as new:
                    new.write_bytes(first + line)
                self._is_kept = True
                return
            self._stream = self.path.open("ab", buffering=0)  # nothing is left to be written when a full disk ends it
            self._stream.truncate(size)
        with disk_errors(self.path):
            while line:  # a write to an almost full disk may end early, and the next one fails
                line = line[self._stream.write(line) :]
            os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def delete(self) -> None:
        """Close and delete the file, once the results are stored elsewhere."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _lines(self) -> Iterator[bytes]:
        """The complete lines of the file: a last one that an interruption cut is left out."""
        if self._is_kept and self.path.exists():
            with self.path.open("rb") as stream:
                yield from (line for line in stream if line.endswith(b"\n"))

    def _parsed(self, number: int, line: bytes, read: Callable[[Any], Any] = lambda entry: entry) -> Any:
        with reading(f"{self.path} line {number}", "delete the file and start over"):
            return read(parse_line(line))


def _differences(recorded: Any, settings: Mapping[str, Any]) -> str:
    """The settings that differ, by name; those that are short with both values."""
    recorded = recorded if isinstance(recorded, dict) else {}
    names = [key for key, value in settings.items() if recorded.get(key) != value]
    is_long = {key: isinstance(settings[key], (dict, list)) for key in names}
    short = {key: f"{key} {recorded.get(key)!r} instead of {settings[key]!r}" for key in names}
    return " and ".join(f"different {key}" if is_long[key] else short[key] for key in names) or "more settings"
