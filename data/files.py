"""Files of users: atomic writes, reads whose errors name the file, checksums, locks, and text that is safe to show."""

from __future__ import annotations

import codecs
import errno
import fcntl
import gzip
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import stat
import sys
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from fnmatch import fnmatch
from functools import cache
from glob import escape
from io import BufferedIOBase
from math import isinf
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.control import Control
from rich.segment import Segment
from safetensors import SafetensorError

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


MAX_DEPTH = 100  # of lists and objects inside each other: far below where Python's own recursion ends
MAX_SETTINGS_BYTES = 1 << 26  # of a JSON file that holds settings or results
Pairs = list[tuple[str, Any]]
# Only texts in which these occur are searched value by value. Python reads such a number, and no array holds it.
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
LONG_NUMBER = re.compile(r"\d{19}|\d[eE]\+?\d{3}")


class MalformedJSON(ValueError):
    """A text is not JSON, or exceeds a bound; the message says why.

    Args:
        reason: Why it is refused.
        line: Number of the line of the text where it is wrong, from 1; None if it is the text as a whole.
    """

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line


def refuse_repeated_keys(pairs: Pairs) -> dict[str, Any]:
    """Build an object, or raise `MalformedJSON` if a key occurs twice; Python would keep the last value in silence."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise MalformedJSON(f"the key {max(keys, key=keys.count)[:40]!r} occurs twice in one object")
    return values


def parse_json(
    text: str | bytes, strict: bool = True, make_object: Callable[[Pairs], Any] = refuse_repeated_keys
) -> Any:
    """Parse a JSON text. NaN and Infinity are read, because Python writes them.

    Args:
        text: The text, or its bytes in UTF-8, with or without a byte order mark.
        strict: Whether numbers beyond 64 bits and strings with half of a surrogate pair, which no file in UTF-8 can
            hold, are refused. Where a file holds many records, its reader checks what it uses of each.
        make_object: Builds the value of an object from its keys and values.

    Raises:
        MalformedJSON: It is not JSON, or nested more than `MAX_DEPTH` deep, or refused by ``strict``.
    """
    if isinstance(text, bytes):
        text = _decoded(text)
    is_bounded = strict and LONG_NUMBER.search(text)
    numbers: dict[str, Any] = {"parse_int": _bounded_int, "parse_float": _bounded_float} if is_bounded else {}
    try:
        value = json.loads(text.removeprefix("\ufeff"), object_pairs_hook=make_object, **numbers)
    except json.JSONDecodeError as error:
        raise MalformedJSON(f"invalid JSON ({error.msg})", error.lineno) from error
    except RecursionError as error:
        raise MalformedJSON("invalid JSON (nested too deeply)") from error
    except MalformedJSON:
        raise
    except ValueError as error:  # Python reads at most 4300 digits
        raise MalformedJSON("invalid JSON (a number of thousands of digits)") from error
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value)
    if strict and SURROGATE.search(text):
        _check_surrogates(value)
    return value


def read_json(path: str | Path, max_bytes: int = MAX_SETTINGS_BYTES) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: It cannot be read, or `parse_json` refuses it. The message names the file and the line.
    """
    try:
        return parse_json(read_document(path, max_bytes))
    except MalformedJSON as error:
        raise ValueError(f"{path}{f' line {error.line}' if error.line else ''}: {error}") from error
    except UNREADABLE as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error


def read_json_lines(path: str | Path) -> Iterator[tuple[str, Any]]:
    """Yield the place, such as ``FILE line 3``, and the value of each line that is not empty.

    Raises:
        ValueError: The file cannot be read, or `parse_json` refuses a line. The message names the file and the line.
    """
    number = 0
    try:
        for number, line in enumerate(read_lines(path), start=1):
            if line is None:
                raise ValueError(f"{path} line {number}: more than {MAX_LINE_BYTES >> 20} MiB")
            if line.strip():
                yield f"{path} line {number}", parse_json(line.strip())
    except MalformedJSON as error:
        raise ValueError(f"{path} line {number}: {error}") from error
    except UNREADABLE as error:
        raise ValueError(f"{path}: cannot be read after line {number} ({error})") from error


def _decoded(data: bytes) -> str:
    try:
        return data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedJSON(f"not UTF-8 ({error.reason})", data.count(b"\n", 0, error.start) + 1) from error


def _bounded_int(digits: str) -> int:
    if not -(1 << 63) <= (number := int(digits)) < 1 << 63:
        raise MalformedJSON(f"invalid JSON (a number beyond 64 bits, {digits[:24]}...)")
    return number


def _bounded_float(digits: str) -> float:
    if isinf(number := float(digits)):
        raise MalformedJSON(f"invalid JSON (a number beyond 64 bits, {digits[:24]})")
    return number


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for values in inner for each in values if isinstance(each, (dict, list))]
        if not level:
            return
    raise MalformedJSON("invalid JSON (nested too deeply)")


def _check_surrogates(value: Any) -> None:
    """Raise MalformedJSON if a string, keys included, cannot be written as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise MalformedJSON("not valid Unicode (half of a surrogate pair)") from error


MAX_BYTES = 1 << 18  # the parser of PyYAML takes about a second for so many
MAX_NODES = 100_000  # with each alias counted as what it stands for
MAX_YAML_DEPTH = 50


class UnboundedYAML(ValueError):
    """A text stands for more values than any config has, or is nested too deeply."""


def check_yaml(text: str) -> None:
    """Raise `UnboundedYAML` if a text exceeds the bounds, or yaml.YAMLError if it is not YAML."""
    if len(text) > MAX_BYTES:
        raise UnboundedYAML(f"more than {MAX_BYTES >> 10} KiB of YAML")
    if max(text.count("["), text.count("{"), text.count("- "), text.count("\n")) < MAX_YAML_DEPTH and "&" not in text:
        return  # most values of a command line
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_YAML_DEPTH:
            raise UnboundedYAML("YAML that is nested too deeply")
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is not None and _num_nodes(root, {}) > MAX_NODES:
        raise UnboundedYAML(f"YAML whose aliases stand for more than {MAX_NODES:,} values")


def read_yaml(path: str | Path) -> Any:
    """Read a YAML file.

    Raises:
        ValueError: It is not a regular file, cannot be read, is not UTF-8, or exceeds the bounds.
        yaml.YAMLError: It is not YAML.
    """
    try:
        text = read_document(path, MAX_BYTES).decode("utf-8")
    except UNREADABLE as error:
        raise ValueError(f"{path} cannot be read ({error})") from error
    check_yaml(text)
    return yaml.safe_load(text)


def _num_nodes(node: yaml.Node, known: dict[int, float]) -> float:
    """Number of values that a node stands for; infinite if it contains itself."""
    if id(node) not in known:
        known[id(node)] = float("inf")  # until it is counted
        children = node.value if isinstance(node, yaml.CollectionNode) else []
        pairs = (child if isinstance(child, tuple) else (child,) for child in children)
        known[id(node)] = 1 + sum(_num_nodes(child, known) for pair in pairs for child in pair)
    return known[id(node)]


CHECKSUMS = "SHA256SUMS"
LINE = re.compile(r"(?P<digest>[0-9a-f]{64}) [ *](\./)?(?P<name>.+)")  # sha256sum marks files read as binary by a star


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def write_checksums(folder: Path) -> None:
    """Write the checksums of all files of a folder, except those in Markdown, which anyone may edit, next to them."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix != ".md")
    text = "".join(f"{checksum(path)}  {path.name}\n" for path in files)
    (folder / CHECKSUMS).write_text(text, encoding="utf-8")


def check_files(folder: Path, *names: str) -> None:
    """Compare files of a folder with their checksums. Files without a checksum are not checked.

    Args:
        folder: The folder.
        names: Names of the files; by default all that have a checksum.

    Raises:
        ValueError: A file is missing or differs, or the list of checksums is damaged.
    """
    path = folder / CHECKSUMS
    if not path.is_file():
        return  # an earlier version wrote none
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        expected = {match["name"]: match["digest"] for match in map(_parsed, lines)}
    except ValueError as error:
        raise ValueError(f"{path} is damaged: copy or export the folder again") from error
    for name in names or expected:
        file = folder / Path(name).name
        if name in expected and (not file.is_file() or checksum(file) != expected[name]):
            raise ValueError(
                f"{file} is damaged or cut short, or was edited: it does not have its checksum in {CHECKSUMS}; copy or "
                f"export the folder again, or delete {CHECKSUMS} if you edited the file"
            )


def _parsed(line: str) -> re.Match[str]:
    if match := LINE.fullmatch(line):
        return match
    raise ValueError(f"not a checksum: {line[:80]}")


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


SECRETS = ("OPENAI_API_KEY", "DRAFTERS_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # environment variables
MIN_SECRET_LENGTH = 6  # a shorter value, such as "none", is not a secret, and would be found in any text

C0 = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}  # shown as the symbols for them
C1 = range(0x80, 0xA0)
BIDIRECTIONAL = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
SURROGATES = range(0xD800, 0xE000)
VISIBLE = C0 | {0x7F: 0x2421} | dict.fromkeys((*C1, *BIDIRECTIONAL, *SURROGATES, 0x2028, 0x2029), 0xFFFD)
MARKDOWN = re.compile(r"([\\`*|<>\[\]])")


def safe_text(text: object) -> str:
    r"""Make everything visible that would change a terminal or the order of a text, except tabs and line breaks.

    These are the control characters of C0 and C1, DEL, the marks of bidirectional text, line separators, and halves of
    surrogate pairs, which no file can hold. The secrets of the environment are replaced by their names.

    >>> safe_text("\x1b[2Jno\x9b0m\u202e")
    '␛[2Jno�0m�'
    """
    return redacted(str(text)).translate(VISIBLE)


def well_formed(text: str) -> str:
    r"""Join surrogate pairs, and replace halves of a pair by U+FFFD: no file in UTF-8 can hold either.

    >>> well_formed("\ud83d\ude00 \ud83d")
    '😀 �'
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def safe_line(text: object) -> str:
    """`safe_text` on one line."""
    return safe_text(" ".join(str(text).splitlines()))


def redacted(text: str) -> str:
    """Replace the API keys and tokens of the environment by their names, as in ``[OPENAI_API_KEY]``."""
    for name in SECRETS:
        secret = os.environ.get(name, "")
        for form in dict.fromkeys((secret, secret.strip(), repr(secret)[1:-1])):
            if len(form) >= MIN_SECRET_LENGTH:
                text = text.replace(form, f"[{name}]")
    return text


def code_span(text: object) -> str:
    """`safe_line` between the backticks of Markdown, which it cannot leave."""
    return f"`{safe_line(text).replace('`', '´')}`"


def yaml_line(key: str, value: str) -> str:
    """A line of YAML, with the value in quotes if it would mean something else without them."""
    return yaml.safe_dump({key: safe_line(value)}, allow_unicode=True, width=float("inf")).strip()


def escape_markdown(text: object) -> str:
    r"""`safe_line` with the characters escaped that Markdown interprets.

    >>> escape_markdown("a|b\r\n<i>")
    'a\\|b \\<i\\>'
    """
    return MARKDOWN.sub(r"\\\1", safe_line(text))


class SafeConsole(Console):
    """A rich console that prints `safe_text`, and takes square brackets for themselves instead of markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False} | options)
        self.push_render_hook(_SafeText())


class _SafeText(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [each if isinstance(each, Control) else _Safe(each) for each in renderables]


class _Safe:
    def __init__(self, content: ConsoleRenderable) -> None:
        self.content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.content, options):
            yield segment if segment.control else Segment(safe_text(segment.text), segment.style)


@contextmanager
def safe_messages() -> Iterator[None]:
    """Make the text of warnings and log records safe, whichever library writes them."""
    format_warning, make_record = warnings.formatwarning, logging.getLogRecordFactory()

    def format_safely(*args: Any, **options: Any) -> str:
        return safe_text(format_warning(*args, **options))

    def make_safe_record(*args: Any, **options: Any) -> logging.LogRecord:
        record = make_record(*args, **options)
        with suppress(TypeError, ValueError):  # arguments that do not fit the message, which logging reports later
            record.msg, record.args = safe_text(record.getMessage()), None
        if record.exc_info and record.exc_info[0]:
            record.exc_text = safe_text("".join(traceback.format_exception(*record.exc_info)))
        return record

    warnings.formatwarning = format_safely
    logging.setLogRecordFactory(make_safe_record)
    try:
        yield
    finally:
        warnings.formatwarning = format_warning
        logging.setLogRecordFactory(make_record)


def print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error and its traceback as safe text, as `sys.excepthook` does."""
    sys.stderr.write(safe_text("".join(traceback.format_exception(kind, error, trace))))


MALFORMED = (ValueError, TypeError, LookupError, AttributeError, OverflowError)
"""What reading the wrong parts of a parsed JSON value may raise."""


def validated(kind: Any, value: Any) -> Any:
    """Build a dataclass, or another type such as ``list[int]``, from parsed JSON.

    Lists become tuples and whole numbers become floats where the type says so; unknown keys are left out.

    Raises:
        ValueError: A field is missing or has another type. The message, of one line, names it.
    """
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{place}: {first['msg']}" if place else first["msg"]) from error


@cache
def _adapter(kind: Any) -> TypeAdapter:
    return TypeAdapter(kind)
