"""A lock for each place that a command writes to, so that a second process is told who writes there."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

MAX_ENTRY_BYTES = 1000
# The command itself says why it cannot write to such a place.
UNUSABLE = (FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError)


@contextmanager
def output_lock(out: str | Path, makes_folders: bool = True) -> Iterator[None]:
    """Hold the lock of an output file or folder; a process on the same or another machine that wants it is refused.

    The system releases the lock when its process ends, however it ends, so a lock file that is left over is no
    obstacle. The file is deleted at the end. Where the file system knows no locks, none is held.

    Args:
        out: The file or folder. The lock file is ``.NAME.lock`` next to it, or ``.lock`` in the folder if nothing can
            be written next to it.
        makes_folders: Whether the folders above, which may be missing, are made.

    Raises:
        ValueError: Another process holds the lock; the message says which, where and since when.
    """
    place = Path(os.path.realpath(out))
    is_inside = place.is_dir() and not os.access(place.parent, os.W_OK)
    path = place / ".lock" if is_inside else place.with_name(f".{place.name}.lock")
    created: list[Path] = []
    handle = None
    try:
        with suppress(*UNUSABLE):
            if makes_folders:
                _make_folders(path.parent, created)
            handle = _acquire(path, out)
        yield
    finally:
        if handle is not None:
            path.unlink(missing_ok=True)
            os.close(handle)
        for folder in created:  # the deepest first; those that hold results stay
            with suppress(OSError):
                folder.rmdir()


def _make_folders(folder: Path, created: list[Path]) -> None:
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    created += missing


def _acquire(path: Path, out: str | Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _describe(os.read(handle, MAX_ENTRY_BYTES))
            os.close(handle)
            raise ValueError(
                f"{out} is in use by {holder}: wait until it ends, or choose another place to write to"
            ) from None
        except OSError:  # the file system knows no locks
            break
        if _is_still(path, handle):
            break
        os.close(handle)
    entry = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now().isoformat(" ", "seconds")}
    with suppress(OSError):  # on a full disk, the lock does not say who holds it
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps(entry).encode())
    return handle


def _is_still(path: Path, handle: int) -> bool:
    """Whether an open lock file has not been deleted by its former holder since it was opened."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def _describe(entry: bytes) -> str:
    try:
        holder = json.loads(entry)
        return f"process {int(holder['pid'])} on {holder['host']} since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
