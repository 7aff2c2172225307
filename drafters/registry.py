"""The drafters by name: `register`, and a line in ``drafters/__init__.py``, is all that a new drafter needs."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

from drafters.protocol import LearnedDrafter, NoDrafter

MODULES = "DRAFTERS_MODULES"
"""Environment variable: names of modules, separated by commas, that register additional drafters."""

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True)
class Registration:
    """A drafter and how a command line builds it, as `register` was told."""

    name: str
    build: Callable[..., Any]
    file: str = ""
    is_optional: bool = False
    load: Callable[[str], Any] | None = None
    argument: str = ""
    command: str = ""

    @property
    def learned_class(self) -> type[LearnedDrafter] | None:
        """The drafter's class if it has weights, else None."""
        is_learned = isinstance(self.build, type) and issubclass(self.build, LearnedDrafter)
        return self.build if is_learned else None  # type: ignore[return-value]


_REGISTRATIONS: dict[str, Registration] = {}


def register(
    name: str,
    file: str = "",
    is_optional: bool = False,
    load: Callable[[str], Any] | None = None,
    argument: str = "",
    command: str = "",
) -> Callable[[T], T]:
    """Register a drafter's class, or a function that builds one, under its command-line name.

    A subclass of `LearnedDrafter` can then be trained, exported and loaded; ``NAME=FOLDER`` names its folder. A module
    of your own is known once it is imported; commands import those named by the environment variable DRAFTERS_MODULES.

    Args:
        name: Name in ``--drafter NAME``.
        file: What ``NAME=...`` names, such as CORPUS; nothing by default.
        is_optional: Whether ``=...`` may be left out.
        load: Reads that file. Without it, what is decorated gets the base's runner and the file's name first.
        argument: Argument that takes what was read.
        command: The `drafters` command that writes the file.
    """

    def decorate(build: T) -> T:
        other = _REGISTRATIONS[name].build if name in _REGISTRATIONS else build
        if other is not build and full_path(other) != full_path(build):
            raise ValueError(f"two drafters are registered as {name!r}: {full_path(other)}, {full_path(build)}")
        _REGISTRATIONS[name] = Registration(name, build, file, is_optional, load, argument, command)
        return build

    return decorate


@cache
def _import_named_modules() -> None:
    for name in os.environ.get(MODULES, "").replace(",", " ").split():
        try:
            import_module(name)
        except ImportError as error:
            raise ValueError(f"{MODULES} names {name}, which cannot be imported: {error}") from error


def registered() -> dict[str, Registration]:
    """All registered drafters by name, those without weights first, each kind in alphabetical order."""
    _import_named_modules()
    return dict(sorted(_REGISTRATIONS.items(), key=lambda item: (item[1].learned_class is not None, item[0])))


def learned() -> dict[str, type[LearnedDrafter]]:
    """The classes of the registered drafters with weights, by name."""
    return {name: kind for name, entry in registered().items() if (kind := entry.learned_class)}


def full_path(build: Callable[..., Any]) -> str:
    """Module and name of a class or function."""
    return f"{build.__module__}.{build.__qualname__}"


def class_path(drafter_class: type[LearnedDrafter]) -> str:
    """The class path in recipes: ``drafters.CTC`` for a class of this package, else module and name."""
    inside = drafter_class.__module__.startswith("drafters.")
    return f"drafters.{drafter_class.__name__}" if inside else full_path(drafter_class)


def find_class(path: str) -> type[LearnedDrafter]:
    """The learned drafter that a recipe names; nothing is imported by the name, so a recipe runs no code."""
    for kind in learned().values():
        if path in (class_path(kind), full_path(kind)):
            return kind
    raise ValueError(
        f"{path!r} is not a registered learned drafter: import the module that registers it, or name the module in the "
        f"environment variable {MODULES}; registered are {', '.join(class_path(kind) for kind in learned().values())}"
    )


register("none")(NoDrafter)
