"""Append-only JSONL journal that lets an interrupted run continue."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

from data.files import MALFORMED, disk_errors

T = TypeVar("T")


class Journal:
    """The results of a long run, one JSON value per line, behind a first line with the settings of the run.

    Opening or reading a journal never changes its file. The first `append` creates the file, or cuts off a last line
    that an interruption left incomplete.

    Args:
        path: The journal's file; it need not exist yet.
        settings: Everything that the results depend on, as JSON values.
        existing: What happens to a journal that is already there. ``continue`` keeps its entries and raises ValueError
            if its settings differ, ``replace_if_different`` drops them if its settings differ, ``replace`` drops them.
        labels: The names by which users know some keys of the settings, for error messages.
        may_lack: Keys that the settings of older versions lack. They are compared only if the journal has them.

    Raises:
        ValueError: The file belongs to a run with other settings, or its first line is damaged.
    """

    def __init__(
        self,
        path: str | Path,
        settings: Mapping[str, Any],
        existing: Literal["continue", "replace_if_different", "replace"] = "continue",
        labels: Mapping[str, str] | None = None,
        may_lack: Collection[str] = (),
    ) -> None:
        self.path = Path(path)
        self.settings = json.loads(json.dumps(settings))  # as they are read back: tuples are lists
        self._stream: FileIO | None = None  # opened by the first append
        if self.path.exists() and not self.path.is_file():
            raise ValueError(f"{path} is not a regular file: choose another --out")
        self._num_bytes = 0 if existing == "replace" else self._count_complete_lines()
        if self._num_bytes:
            recorded = next(self._read())
            if isinstance(recorded, dict):
                recorded = {key: self.settings[key] for key in may_lack if key in self.settings} | recorded
            if recorded != self.settings:
                if existing == "continue":
                    raise ValueError(
                        f"{path} was started with {_differences(recorded, self.settings, labels or {})}: repeat that "
                        "command to continue it, pass --overwrite to start over, or choose another --out"
                    )
                self._num_bytes = 0

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Any]:
        """The entries, without the settings."""
        return self.entries(lambda entry: entry)

    def entries(self, read: Callable[[Any], T]) -> Iterator[T]:
        """What ``read`` makes of each entry, without the settings.

        Raises:
            ValueError: An entry is not JSON, or ``read`` cannot make anything of it. The message names the line.
        """
        for number, entry in enumerate(self._read(), start=1):
            if number == 1:
                continue
            try:
                value = read(entry)
            except MALFORMED as error:
                raise self._damage(number) from error
            yield value

    def append(self, entry: Any) -> None:
        """Add an entry; it is on the disk when this returns."""
        if self._stream is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_symlink():
                raise ValueError(f"{self.path} is a symbolic link, which is never written through: delete it")
            self._stream = self.path.open("ab", buffering=0)  # nothing is left to be written when a full disk ends it
            self._stream.truncate(self._num_bytes)
            if not self._num_bytes:
                self._write(self.settings)
        self._write(entry)
        with disk_errors(self.path):
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
        self._num_bytes = 0

    def _write(self, value: Any) -> None:
        assert self._stream is not None
        line = json.dumps(value, separators=(",", ":")).encode() + b"\n"
        with disk_errors(self.path):
            written = 0
            while written < len(line):  # a write to an almost full disk may end early, and the next one fails
                written += self._stream.write(line[written:])
        self._num_bytes += len(line)

    def _count_complete_lines(self) -> int:
        """Number of bytes up to the end of the last complete line."""
        if not self.path.exists():
            return 0
        with self.path.open("rb") as stream:
            return sum(len(line) for line in stream if line.endswith(b"\n"))

    def _read(self) -> Iterator[Any]:
        if not self._num_bytes:
            return
        position = 0
        with self.path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                position += len(line)
                if position > self._num_bytes:
                    return
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise self._damage(number) from error

    def _damage(self, number: int) -> ValueError:
        return ValueError(f"{self.path} line {number} is damaged: delete the file and start over")


def _differences(recorded: Any, settings: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    recorded = recorded if isinstance(recorded, dict) else {}
    differences = []
    for key, value in settings.items():
        if recorded.get(key) != value:
            label = labels.get(key, key)
            is_long = isinstance(value, (dict, list))
            differences.append(
                f"different {label}" if is_long else f"{label} {recorded.get(key)!r} instead of {value!r}"
            )
    return " and ".join(differences) or "more settings than this run has"
