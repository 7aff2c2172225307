"""A file that grows by whole lines while a long work goes on, so that a stop at any moment loses only the last one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


class Journal:
    """Lines of JSON behind a first line that says what the work is.

    A last line that was cut short is taken away, and the work goes on behind the one before it.

    Args:
        path: Of the file; it is made where there is none.
        work: What decides what the lines will be: a work begun with another is refused.
        is_anew: Whether a work begun with another is thrown away instead.
        called: What a user calls some of the work's keys.

    Raises:
        ValueError: Another work was begun there, or a line in the middle is damaged.
    """

    def __init__(
        self, path: Path, work: dict[str, Any], is_anew: bool = False, called: Mapping[str, str] | None = None
    ) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = path.open("a+b")
        whole = self._whole_lines()
        if not whole or (is_anew and next(self._read(1)) != work):
            self._stream.truncate(0)
            self.append(work)
        else:
            self._stream.truncate(whole)
            begun = next(self._read(1))
            if begun != work:
                self._stream.close()
                raise ValueError(
                    f"{path} was begun with {_differing(begun, work, called or {})}: repeat that command to go on, "
                    "or give --overwrite to begin anew, or another --out"
                )

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def __iter__(self) -> Iterator[Any]:
        """The lines behind the first."""
        lines = self._read()
        next(lines)
        return lines

    def append(self, line: Any) -> None:
        """Add a line; it is on the disk when this returns."""
        self._stream.seek(0, os.SEEK_END)
        self._stream.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def _whole_lines(self) -> int:
        """Bytes up to the last line's end."""
        self._stream.seek(0)
        return sum(len(line) for line in self._stream if line.endswith(b"\n"))

    def _read(self, limit: int | None = None) -> Iterator[Any]:
        self._stream.seek(0)
        for number, line in enumerate(self._stream, start=1):
            if limit is not None and number > limit:
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"{self.path} line {number} is damaged: delete the file, and begin anew") from error


def _differing(begun: Any, work: dict[str, Any], called: Mapping[str, str]) -> str:
    begun = begun if isinstance(begun, dict) else {}
    keys = [key for key, value in work.items() if begun.get(key) != value]
    told = [
        f"other {name}" if isinstance(work[key], (dict, list)) else f"{name} {begun.get(key)!r}, not {work[key]!r}"
        for key in keys
        for name in [called.get(key, key)]
    ]
    return " and ".join(told) or "more than this"
