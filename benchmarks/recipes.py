"""Options of a drafter by their names alone, as the arms of benchmarks and the tests give them."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from drafters import recipe
from drafters.protocol import BaseShape, LearnedDrafter


def grouped(
    drafter_class: type[LearnedDrafter], options: Mapping[str, Any], init_args: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The arguments of a drafter's recipe: options by name, each in its group, over those of another recipe.

    >>> grouped(CTC, {"num_nodes": 64}, {"draft": {"top_k": 4}})
    {'draft': {'top_k': 4, 'num_nodes': 64}}
    """
    group_of = {field.name: name for name, group in recipe.groups(drafter_class).items() for field in fields(group)}
    arguments = dict(init_args or {})
    for name, value in options.items():
        group = group_of.get(name)
        arguments |= {group: {**arguments.get(group, {}), name: value}} if group else {name: value}
    return arguments


def build(drafter_class: type[LearnedDrafter], base: BaseShape, init_args: Mapping[str, Any]) -> LearnedDrafter:
    """A drafter with fresh weights, from options by name or in groups."""
    return recipe.build(drafter_class, base, grouped(drafter_class, init_args))
