"""Checks that parsed JSON has the fields and types of a dataclass, before anything computes with it."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

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
