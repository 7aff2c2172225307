"""Recipes of learned drafters: options grouped in frozen dataclasses."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from inspect import Parameter, signature
from typing import Any, get_type_hints

from drafters.protocol import BaseShape, LearnedDrafter

DRAFT = "draft"
"""Constructor argument that holds what decoding may change; training fixes all others."""


def groups(drafter_class: type[LearnedDrafter]) -> dict[str, type]:
    """The constructor arguments that are groups of options, with their dataclasses."""
    hints = get_type_hints(drafter_class.__init__)
    return {
        name: hint for name, hint in hints.items() if name != "base" and isinstance(hint, type) and is_dataclass(hint)
    }


def flattened(init_args: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys instead of nested ones: ``{"draft": {"top_k": 4}}`` becomes ``{"draft.top_k": 4}``."""
    result: dict[str, Any] = {}
    for name, value in init_args.items():
        if isinstance(value, Mapping):
            result |= {f"{name}.{key}": inner for key, inner in flattened(value).items()}
        else:
            result[name] = value
    return result


def build(drafter_class: type[LearnedDrafter], base: BaseShape, init_args: Mapping[str, Any]) -> LearnedDrafter:
    """Build a drafter with fresh weights.

    Options of decoding and of the loss that are no longer there are left out, as the weights are as good without them.
    Any other unknown argument is a TypeError, and a value out of range a ValueError.
    """
    arguments = dict(init_args)
    for name, group in groups(drafter_class).items():
        if isinstance(options := arguments.get(name), Mapping):
            has_gone = (options.keys() - defaults(group)) if name in (DRAFT, "loss") else ()
            arguments[name] = group(**{key: value for key, value in options.items() if key not in has_gone})
    return drafter_class(base, **arguments)


def draft_defaults(drafter_class: type[LearnedDrafter]) -> dict[str, Any]:
    """The options that decoding may change, with their defaults."""
    group = groups(drafter_class).get(DRAFT)
    return defaults(group) if group else {}


def training_defaults(drafter_class: type[LearnedDrafter]) -> dict[str, Any]:
    """The options that training fixes, with their defaults, by their flat names."""
    options = groups(drafter_class)
    values = {
        name: parameter.default
        for name, parameter in signature(drafter_class).parameters.items()
        if name not in options and parameter.default is not Parameter.empty
    }
    for name, group in options.items():
        if name != DRAFT:
            values |= defaults(group)
    return values


def defaults(group: type) -> dict[str, Any]:
    """The options of a group, with their defaults."""
    return dict(vars(group()))
