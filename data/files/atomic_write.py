"""Write files and folders that appear complete or not at all."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from glob import escape
from pathlib import Path

from safetensors import SafetensorError

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
RUST_ERROR = re.compile(r"\(os error (\d+)\)")  # how safetensors and tokenizers name an error of the system


class DiskError(ValueError):
    """A file could not be written, because the disk is full or damaged. What was there before is unchanged."""


@contextmanager
def disk_errors(path: str | Path) -> Iterator[None]:
    """Turn what Python and the libraries in Rust raise for a full or damaged disk into a `DiskError`."""
    try:
        yield
    except DiskError:
        raise
    except Exception as error:
        code = _error_number(error)
        if code not in DISK_ERRORS:
            raise
        raise DiskError(
            f"{path} could not be written ({os.strerror(code)}), and what was there before is kept: "
            "make room, then repeat the command"
        ) from error


def _error_number(error: Exception) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    # The tokenizers library raises plain exceptions.
    found = RUST_ERROR.search(str(error)) if isinstance(error, SafetensorError) or type(error) is Exception else None
    return int(found[1]) if found else None


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a temporary file in the same folder, which replaces ``path`` if the block succeeds.

    The folder is created if it does not exist. If the block raises, the temporary file is deleted and ``path`` stays as
    it was. The file gets the permissions that `open` would give it, whatever writes it. When the block ends, the file
    and its name are on the disk.

    Raises:
        ValueError: ``path`` is a symbolic link, a folder or a device; `DiskError` if the disk is full.
    """
    path = Path(path)
    if path.is_symlink():
        raise ValueError(f"{path} is a symbolic link, which is never written through: delete it, or give another name")
    if path.exists() and not path.is_file():  # root could replace even a device such as /dev/null
        raise ValueError(f"{path} is {'a folder' if path.is_dir() else 'not a regular file'}: give another name")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path)
        temporary = _temporary(path, "new")
        try:
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            mode = temporary.stat().st_mode
            yield temporary
            temporary.chmod(mode)  # safetensors creates files that only their owner can read
            _sync(temporary)
            os.replace(temporary, path)
            _sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    r"""Write a text file atomically, in UTF-8; half of a surrogate pair is written as its escape, like ``\ud83d``."""
    with atomic_write(path) as new:
        new.write_text(text, encoding="utf-8", errors="backslashreplace")


@contextmanager
def atomic_folder(path: str | Path, replaced: Sequence[str] = ()) -> Iterator[Path]:
    """Yield a temporary folder next to ``path``, which takes its place if the block succeeds.

    If the block raises, the temporary folder is deleted and ``path`` stays as it was. The old folder is renamed, and
    deleted when the new one is in its place; what a killed process left of either is cleaned up by the next call.

    Args:
        path: Folder to write. If it is a link to a folder, that folder is written.
        replaced: Patterns of file names. Files of an existing folder are kept unless the new one has a file of that
            name, or one of these patterns fits.

    Raises:
        ValueError: ``path`` is a file or device, or cannot be replaced; `DiskError` if the disk is full.
    """
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_dir():
        raise ValueError(f"{path} is not a folder: give another name")
    with disk_errors(path):
        place.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(place)
        _finish_swap(place, replaced)
        temporary = _temporary(place, "new")
        try:
            temporary.mkdir()
            yield temporary
            for file in temporary.rglob("*"):
                _sync(file)
            _sync(temporary)
            if place.exists():
                _rename(place, _temporary(place, "old"), path)
            _rename(temporary, place, path)
            _sync(place.parent)
            _finish_swap(place, replaced)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def scratch_folder(path: str | Path) -> Iterator[Path]:
    """Yield an empty folder next to ``path`` for temporary files, and delete it at the end.

    What a killed process left there is deleted by the next call, and by the next `atomic_write` of ``path``.
    """
    path = Path(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path)
        temporary = _temporary(path, "new")
        try:
            temporary.mkdir()
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _rename(old: Path, new: Path, path: str | Path) -> None:
    try:
        os.rename(old, new)
    except OSError as error:
        if error.errno in DISK_ERRORS:
            raise
        raise ValueError(f"{path} cannot be replaced ({error.strerror}): give another folder") from error


def _finish_swap(place: Path, replaced: Sequence[str]) -> None:
    """Put an old folder back if nothing took its place; else keep its other files, and delete it."""
    for old in _siblings(place, "old"):
        if not place.exists():
            os.rename(old, place)
            continue
        for file in old.iterdir():
            if not (place / file.name).exists() and not any(fnmatch(file.name, pattern) for pattern in replaced):
                os.rename(file, place / file.name)
        shutil.rmtree(old)


def _temporary(path: Path, kind: str) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.{kind}")


def _siblings(path: Path, kind: str) -> list[Path]:
    """What `_temporary` names for processes that are gone, or for this one."""
    pattern = re.compile(rf"{re.escape(path.name)}\.(\d+)\.{kind}")
    found = [(pattern.fullmatch(each.name), each) for each in path.parent.glob(f"{escape(path.name)}.*.{kind}")]
    return [each for match, each in found if match and not _runs_elsewhere(int(match[1]))]


def _remove_leftovers(path: Path) -> None:
    for leftover in _siblings(path, "new"):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _runs_elsewhere(process: int) -> bool:
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to another user
        return True
    return True


def _sync(path: Path) -> None:
    """Wait until a file, or the list of files of a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
