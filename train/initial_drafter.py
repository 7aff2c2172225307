"""Starts a training from the weights of an exported or imported drafter instead of fresh ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from drafters import checkpoint, recipe
from drafters.protocol import BaseShape, LearnedDrafter
from inference.drafter_specs import drafter_folder
from inference.verifier.base import Base, check_fit

FREE = "loss", recipe.DRAFT
"""Groups of options that decide no weight: a further training may have others."""


def load_initial(
    folder: str, build: Callable[[BaseShape], LearnedDrafter], recipe_node: Any, base: Base
) -> tuple[LearnedDrafter, BaseShape]:
    """Build a drafter with the weights of a folder.

    Its layers have the sizes of the folder's, which an imported drafter may have of its own.

    Args:
        folder: Folder of an exported or imported drafter, or ``OWNER/NAME@REVISION`` on the hub.
        build: Builds the drafter that is trained.
        recipe_node: Its class_path and init_args, to compare them with those of the folder; anything else is not
            compared.
        base: The base.

    Returns:
        The drafter, and the shape that it was built from.

    Raises:
        ValueError: The folder holds no drafter, one for another base, or one that computes something else.
    """
    loaded, config = checkpoint.load(drafter_folder(folder))
    check_fit(config, base)
    drafter = build(config.base)
    ours, theirs = type(drafter), type(loaded)
    if ours is not theirs:
        raise ValueError(f"the drafter in {folder} is {theirs.__name__}, and model.drafter is {ours.__name__}")
    if isinstance(recipe_node, Mapping):
        given, stored = (_fixed_options(theirs, args) for args in (recipe_node["init_args"] or {}, config.init_args))
        _refuse(folder, {name: value for name, value in stored.items() if given.get(name) != value})
    layers = loaded.required_outputs.hidden_layers
    if drafter.required_outputs.hidden_layers != layers:
        _refuse(folder, {"hidden_layers": list(layers)})
    weights = loaded.state_dict()
    shapes, expected = ({name: weight.shape for name, weight in w.items()} for w in (weights, drafter.state_dict()))
    if differing := sorted(dict(shapes.items() ^ expected.items())):
        raise ValueError(f"the drafter in {folder} has other weights than model.drafter: {differing[0]} differs")
    drafter.load_state_dict(weights)
    return drafter, config.base


def _fixed_options(drafter_class: type[LearnedDrafter], init_args: Mapping[str, Any]) -> dict[str, Any]:
    """The options that decide what the weights compute, with their defaults, by their flat names.

    Without the fused layers, whose default depends on the base.
    """
    groups = recipe.groups(drafter_class)
    free = {"hidden_layers", *(name for group in FREE if group in groups for name in recipe.defaults(groups[group]))}
    given = recipe.flattened(recipe.nested(init_args, groups))
    values = recipe.training_defaults(drafter_class) | {key.rpartition(".")[2]: value for key, value in given.items()}
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items() if name not in free
    }


def _refuse(folder: str, differing: Mapping[str, Any]) -> None:
    if differing:
        stated = ", ".join(f"{name}: {value}" for name, value in differing.items())
        raise ValueError(f"the drafter in {folder} has other options than model.drafter; give it {stated}")
