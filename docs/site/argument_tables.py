"""Tables of a drafter's arguments, read from the signatures and docstrings that the command line reads."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, get_type_hints

from docstring_parser import parse

from drafters.protocol import BaseShape, LearnedDrafter
from drafters.recipe import DRAFT
from drafters.registry import registered
from inference import model_drafters  # noqa: F401  registers the drafters that need a model


def table(name: str) -> str:
    """A Markdown table of the arguments of ``NAME``; what decoding may change is marked for learned drafters."""
    registration = registered()[name]
    changeable = f"{DRAFT}." if registration.learned_class else None
    rows = [
        f"| `{path}` | `{default}` | {meaning}{' *(decoding)*' if changeable and path.startswith(changeable) else ''} |"
        for path, default, meaning in arguments(registration.build)
    ]
    if not rows:
        return ""
    head = [f'??? note "Arguments of `{name}`"', "", "    | argument | default | meaning |", "    |---|---|---|"]
    return "\n".join(head + [f"    {row}" for row in rows])


def arguments(build: Any, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Name, default and meaning of each argument; the fields of a group follow with dotted names."""
    hints = get_type_hints(build.__init__ if inspect.isclass(build) and not is_dataclass(build) else build)
    documented = docstrings(build)
    for name, parameter in inspect.signature(build).parameters.items():
        hint = hints.get(name)
        if hint is BaseShape or parameter.default is parameter.empty:
            continue
        if is_dataclass(hint) and isinstance(parameter.default, hint):
            fields = dict(arguments_of_default(parameter.default))
            for path, default, meaning in arguments(hint, f"{prefix}{name}."):
                yield path, fields.get(path.rpartition(".")[2], default), meaning
            continue
        yield f"{prefix}{name}", shown(parameter.default), documented.get(name, "")


def arguments_of_default(group: Any) -> Iterator[tuple[str, str]]:
    """The values that a group has by default where it is an argument."""
    for name in inspect.signature(type(group)).parameters:
        yield name, shown(getattr(group, name))


def docstrings(build: Any) -> dict[str, str]:
    """The meaning of each argument, from a Google-style docstring; a class inherits what its bases document."""
    owners = (
        [owner for owner in reversed(build.__mro__) if owner is not LearnedDrafter]
        if inspect.isclass(build)
        else [build]
    )
    found: dict[str, str] = {}
    for owner in owners:
        for parameter in parse(inspect.getdoc(owner) or "").params:
            text = re.sub(r"\s+", " ", parameter.description or "").replace("|", "\\|")
            found[parameter.arg_name] = text.replace("``", "`")
    return found


def shown(value: Any) -> str:
    return "none" if value in ("", None) else str(value).replace("|", "\\|")
