"""Opens regular files, and reads their lines or their whole content, also of .gz files, within bounds."""

from __future__ import annotations

import gzip
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path

MAX_LINE_BYTES = 1 << 24  # of a line of a JSONL file
MAX_DOCUMENT_BYTES = 1 << 32  # of a file that is read as a whole
# Text shrinks to a tenth, rarely to a hundredth; zlib's limit, which a decompression bomb reaches, is 1032.
MAX_RATIO, MIN_BOMB_BYTES = 200, 1 << 26
GZIP_MAGIC = b"\x1f\x8b"
UNREADABLE = (OSError, EOFError, zlib.error)


def kind_of(path: str | Path) -> str | None:
    """What stands at a path in place of a regular file, such as "a folder"; None if it is a regular file.

    Nothing is opened, so a FIFO does not block.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        return f"not accessible ({error.strerror})" if isinstance(error, PermissionError) else "no such file"
    if stat.S_ISDIR(mode):
        return "a folder"
    return None if stat.S_ISREG(mode) else "not a regular file"


def check_folder(folder: str | Path) -> None:
    """Raise ValueError if a folder holds anything besides files and folders, such as a FIFO, which would block."""
    for path in sorted(Path(folder).iterdir()):
        if kind_of(path) == "not a regular file":
            raise ValueError(f"{path} is not a regular file: replace it by a copy of its content")


@contextmanager
def open_regular(path: str | Path, is_compressed: bool | None = None) -> Iterator[BufferedIOBase]:
    """Open a regular file for reading.

    Args:
        path: The file.
        is_compressed: Whether it is decompressed; by default if it is a gzip file by its name or its first bytes.

    Raises:
        ValueError: It is missing, a folder, a FIFO or a device.
    """
    if problem := kind_of(path):
        raise ValueError(f"{path} cannot be read: {problem}; give a regular file")
    with open(path, "rb") as raw:
        if is_compressed is None:
            is_compressed = raw.peek(2)[:2] == GZIP_MAGIC or str(path).endswith(".gz")
        if is_compressed:
            with gzip.GzipFile(fileobj=raw) as stream:
                yield stream
        else:
            yield raw


def read_lines(path: str | Path, max_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes | None]:
    """Yield the lines of a file, decompressed if it is a gzip file; None for a line of more than ``max_bytes``.

    A long line is skipped without holding it in memory.

    Raises:
        ValueError: It is not a regular file, or a decompression bomb.
        OSError, EOFError, zlib.error: It cannot be read, or not be decompressed: `UNREADABLE`.
    """
    with open_regular(path) as stream:
        size = os.stat(path).st_size
        while line := stream.readline(max_bytes + 1):
            is_long = len(line) > max_bytes
            while len(line) > max_bytes and not line.endswith(b"\n"):
                line = stream.readline(max_bytes + 1)
                _check_ratio(path, stream, size)
            _check_ratio(path, stream, size)
            yield None if is_long else line


def read_document(path: str | Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Return the whole content of a file, decompressed if it is a gzip file.

    Raises:
        ValueError: It is not a regular file, a decompression bomb, or larger than ``max_bytes``.
        OSError, EOFError, zlib.error: It cannot be read, or not be decompressed: `UNREADABLE`.
    """
    blocks, num_bytes = [], 0
    with open_regular(path) as stream:
        size = os.stat(path).st_size
        while block := stream.read(MAX_LINE_BYTES):
            blocks.append(block)
            num_bytes += len(block)
            if num_bytes > max_bytes:
                raise ValueError(f"{path}: more than {max_bytes >> 20} MiB")
            _check_ratio(path, stream, size)
    return b"".join(blocks)


def _check_ratio(path: str | Path, stream: BufferedIOBase, size: int) -> None:
    if isinstance(stream, gzip.GzipFile) and stream.tell() > max(MIN_BOMB_BYTES, MAX_RATIO * size):
        raise ValueError(f"{path}: a decompression bomb, {size:,} bytes that grow to more than {MAX_RATIO} times that")
