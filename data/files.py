"""Files of users: errors that name the file, atomic writes, checksums and locks."""

import errno
import gzip
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO, cast

from filelock import FileLock, Timeout
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError

from data.safe_text import safe_line

MALFORMED = (ValueError, TypeError, LookupError, AttributeError, OverflowError)
"""What reading the wrong parts of a parsed JSON value may raise."""


@contextmanager
def reading(path: str | Path, remedy: str = "") -> Iterator[None]:
    """Turn any error raised while a user's file is read into one ValueError of one line.

    The message begins with the file, and ends with what the user can do. An error that already begins with the file is
    raised as it is.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith(str(path)):
            raise
        line = f" line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"{path}{line}: {cause_of(error)}{remedy and '; '}{remedy}") from error


def cause_of(error: BaseException) -> str:
    """Say in a few words what an error of reading means."""
    match error:
        case json.JSONDecodeError():
            return f"invalid JSON ({error.msg})"
        case UnicodeDecodeError():
            return f"not UTF-8 ({error.reason})"
        case KeyError():
            return f"no {error}"
        case UnpicklingError():  # PyTorch's own message suggests to run the code in the file
            return "a file holds more than weights, and code in it is never run: convert it to safetensors"
        case OSError(strerror=str(reason)):
            return reason[0].lower() + reason[1:]
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def open_bytes(path: str | Path) -> BinaryIO:
    """Open a file for reading; it is decompressed if its name ends in .gz."""
    return cast(BinaryIO, gzip.open(path) if str(path).lower().endswith(".gz") else open(path, "rb"))


def read_json(path: str | Path, remedy: str = "") -> Any:
    """Read a JSON file, or raise ValueError with its name, the line, and the remedy."""
    with reading(path, remedy), open_bytes(path) as stream:
        return json.loads(stream.read().decode("utf-8-sig"))


def parse_line(line: bytes) -> Any:
    """Parse a line of JSON, or raise ValueError with what is wrong."""
    try:
        return json.loads(line.strip().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(cause_of(error)) from error


type_adapter = cache(TypeAdapter)


def validated(kind: Any, value: Any) -> Any:
    """Build a dataclass, or another type such as ``list[int]``, from JSON, parsed or as bytes, or raise ValueError.

    Lists become tuples and whole numbers become floats where the type says so; unknown keys are left out.
    """
    try:
        adapter = type_adapter(kind)
        return adapter.validate_json(value) if isinstance(value, bytes) else adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place, reason = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{place}: {reason}" if place else reason) from error


def check_encodable(value: object) -> None:
    """Raise ValueError if a text of a JSON value holds half of a surrogate pair, which no tokenizer encodes."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise ValueError("a text holds half of a character (a lone surrogate), which no tokenizer encodes") from error


def explained(error: BaseException) -> str:
    """What an error says to a user: one of the system names its file first, and ends with what to do."""
    if not isinstance(error, OSError) or not error.filename:
        return str(error)
    remedies = {errno.ENOENT: "", errno.ENAMETOOLONG: "; give a shorter name"}
    return f"{error.filename}: {cause_of(error)}{remedies.get(error.errno or 0, '; give another place')}"


DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
RUST_ERROR = re.compile(r"\(os error (\d+)\)")  # how safetensors and tokenizers name an error of the system


class DiskError(ValueError):
    """A file could not be written, because the disk is full or damaged. What was there before is unchanged."""


@contextmanager
def disk_errors(path: str | Path) -> Iterator[None]:
    """Turn what Python and the libraries in Rust raise for a full or damaged disk into a `DiskError`."""
    try:
        yield
    except Exception as error:
        code = error.errno if isinstance(error, OSError) else None
        # The tokenizers library raises plain exceptions.
        if isinstance(error, SafetensorError) or type(error) is Exception:
            code = int(match[1]) if (match := RUST_ERROR.search(str(error))) else None
        if code not in DISK_ERRORS:
            raise
        raise DiskError(
            f"{path} could not be written ({os.strerror(code)}), and what was there before is kept: "
            "make room, then repeat the command"
        ) from error


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a temporary file in the same folder, which replaces ``path`` if the block succeeds.

    If the block raises, ``path`` stays as it was. What a killed process left is overwritten by the next call. Raises
    ValueError if ``path`` is a link, a folder or a device, and `DiskError` if the disk is full.
    """
    path = Path(path)
    if path.is_symlink() or (path.exists() and not path.is_file()):  # root could replace even /dev/null
        raise ValueError(f"{path} is not a regular file: give another name")
    temporary = path.with_name(f".{path.name}.new")
    with disk_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)
            temporary.touch()
            mode = temporary.stat().st_mode
            yield temporary
            temporary.chmod(mode)  # safetensors creates files that only their owner can read
            _sync(temporary)
            os.replace(temporary, path)
            _sync(path.parent)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    r"""Write a text file atomically, in UTF-8; half of a surrogate pair is written as its escape, like ``\ud83d``."""
    with atomic_write(path) as new:
        new.write_text(text, encoding="utf-8", errors="backslashreplace")


def delete_stale(folder: Path, names: Collection[str]) -> None:
    """List the files that a command has written into a folder, and delete those of the list before; no others."""
    manifest = folder / ".written.json"
    with reading(manifest, "delete it"):
        before = validated(list[str], json.loads(manifest.read_bytes())) if manifest.is_file() else []
    for file in (folder / name for name in {*before}.difference(names)):
        if folder.resolve() in file.resolve().parents:
            file.unlink(missing_ok=True)
    write_text(manifest, json.dumps(sorted(names)))


@contextmanager
def atomic_folder(path: str | Path, replaced: Sequence[str] = ()) -> Iterator[Path]:
    """Yield a temporary folder next to ``path``, which takes its place if the block succeeds, as in `atomic_write`.

    If it is a link to a folder, that folder is written. Files of an existing folder are kept unless the new one has a
    file of that name, or one of the patterns of ``replaced`` fits.
    """
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_dir():
        raise ValueError(f"{path} is not a folder: give another name")
    new, old = (place.with_name(f".{place.name}.{kind}") for kind in ("new", "old"))
    with disk_errors(path):
        try:
            _finish_swap(place, old, replaced)
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
            yield new
            for file in (*new.rglob("*"), new):
                _sync(file)
            if place.exists():
                os.rename(place, old)
            os.rename(new, place)
            _sync(place.parent)
            _finish_swap(place, old, replaced)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def _finish_swap(place: Path, old: Path, replaced: Sequence[str]) -> None:
    """Put an old folder back if nothing took its place; else keep its other files, and delete it."""
    if old.exists() and not place.exists():
        os.rename(old, place)
    elif old.exists():
        for file in old.iterdir():
            if not (place / file.name).exists() and not any(fnmatch(file.name, pattern) for pattern in replaced):
                os.rename(file, place / file.name)
        shutil.rmtree(old)


def _sync(path: Path) -> None:
    """Wait until a file, or the list of files of a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


CHECKSUMS = "SHA256SUMS"
CHECKSUM_LINE = re.compile(r"(?P<digest>[0-9a-f]{64}) [ *](\./)?(?P<name>.+)")  # a star marks files read as binary


def hash_of(parts: Iterable[object], length: int = 64) -> str:
    """Return the first hexadecimal digits of the SHA-256 of texts, bytes and JSON values, one after the other."""
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, (bytes, str)) else json.dumps(part, default=str)
        digest.update(data.encode() if isinstance(data, str) else data)
    return digest.hexdigest()[:length]


def short_hash(text: str) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a text."""
    return hash_of([text], 16)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as stream:
        return hash_of(iter(lambda: stream.read(1 << 22), b""))


def write_checksums(folder: Path) -> None:
    """Write the checksums of all files of a folder next to them, except those in Markdown, which anyone may edit.

    The list of an earlier call is replaced, and is none of these files.
    """
    (folder / CHECKSUMS).unlink(missing_ok=True)
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix != ".md")
    text = "".join(f"{checksum(path)}  {path.name}\n" for path in files)
    (folder / CHECKSUMS).write_text(text, encoding="utf-8")


def check_files(folder: Path, *names: str) -> None:
    """Compare the named files of a folder, or all, with their checksums, which some may not have.

    Raises ValueError if a file is missing or differs, or the list of checksums is damaged.
    """
    path = folder / CHECKSUMS
    if not path.is_file():
        return
    with reading(path, "copy or export the folder again"):
        lines = [CHECKSUM_LINE.fullmatch(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if None in lines:
            raise ValueError("it is damaged")
        expected = {match["name"]: match["digest"] for match in lines if match}
    for name in names or expected:
        file = folder / Path(name).name
        if name in expected and (not file.is_file() or checksum(file) != expected[name]):
            raise ValueError(
                f"{file} is damaged or cut short, or was edited: it does not have its checksum in {CHECKSUMS}; copy or "
                f"export the folder again, or delete {CHECKSUMS} if you edited the file"
            )


@contextmanager
def output_lock(out: str | Path) -> Iterator[None]:
    """Hold the lock of an output file or folder; raise ValueError if a process on this or another machine holds it.

    The system releases the lock when its process ends, however it ends. Folders above that are missing are made, and
    deleted at the end if they are empty. Where no lock can be made, the command itself says why it cannot write there.
    """
    place = Path(os.path.realpath(out))
    is_inside = place.is_dir() and not os.access(place.parent, os.W_OK)
    path = place / ".lock" if is_inside else place.with_name(f".{place.name}.lock")
    made = [folder for folder in path.parents if not folder.exists()]
    lock = FileLock(path, timeout=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        since = datetime.now().isoformat(" ", "seconds")
        path.write_text(f"process {os.getpid()} on {socket.gethostname()} since {since}")
    except Timeout:
        holder = safe_line(path.read_text()) if path.is_file() else ""
        raise ValueError(
            f"{out} is in use by {holder or 'another process'}: wait until it ends, or choose another place to write to"
        ) from None
    except OSError:
        pass
    try:
        yield
    finally:
        if lock.is_locked:
            path.unlink(missing_ok=True)
            lock.release()
        for folder in made:  # the deepest first; those that hold results stay
            with suppress(OSError):
                folder.rmdir()
