"""Reads JSON and JSON lines from files that may be damaged or hostile; errors name the file and the line."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from math import isinf
from pathlib import Path
from typing import Any

from data.files.regular import MAX_LINE_BYTES, UNREADABLE, read_document, read_lines

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
