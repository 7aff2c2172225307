"""Recipes of learned drafters: options grouped in frozen dataclasses, given nested or, in one line, flat."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
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


def nested(init_args: Mapping[str, Any], options: Mapping[str, type]) -> dict[str, Any]:
    """Move flat keys into their groups, given by `groups`; a flat key overrides the same option of a group.

    >>> nested({"num_nodes": 64, "draft": {"top_k": 4}}, groups(CTC))
    {'draft': {'top_k': 4, 'num_nodes': 64}}
    """
    group_of = {field.name: name for name, group in options.items() for field in fields(group)}
    result = {name: value for name, value in init_args.items() if name in options or name not in group_of}
    for name, value in init_args.items():
        if name not in result:
            result[group_of[name]] = {**result.get(group_of[name], {}), name: value}
    return result


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
    """Build a drafter with fresh weights from nested or flat arguments.

    Options of decoding and of the loss that are no longer there are left out, as the weights are as good without them.
    Any other unknown argument is a TypeError, and a value out of range a ValueError.
    """
    options = groups(drafter_class)
    arguments = nested(init_args, options)
    for name, group in options.items():
        if isinstance(given := arguments.get(name), Mapping):
            has_gone = (given.keys() - defaults(group)) if name in (DRAFT, "loss") else ()
            arguments[name] = group(**{key: value for key, value in given.items() if key not in has_gone})
    return drafter_class(base, **arguments)


def draft_defaults(drafter_class: type[LearnedDrafter]) -> dict[str, Any]:
    """The options that decoding may change, with their defaults."""
    group = groups(drafter_class).get(DRAFT)
    return defaults(group) if group else {}


def training_defaults(drafter_class: type[LearnedDrafter]) -> dict[str, Any]:
    """The options that training fixes, with their defaults, by their flat names."""
    options = groups(drafter_class)
    parameters = signature(drafter_class).parameters
    values = {
        name: parameter.default
        for name, parameter in parameters.items()
        if name != "base" and name not in options and parameter.default is not Parameter.empty
    }
    for name, group in options.items():
        if name != DRAFT:
            values |= defaults(group)
    return values


def defaults(group: type) -> dict[str, Any]:
    """The options of a group, with their defaults."""
    return dict(vars(group()))
