"""Class paths of earlier versions, which configs and command lines may still name."""

from __future__ import annotations

from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

NEW_CLASS_PATHS = {
    "train.base_module.BaseTraining": "train.BaseTraining",
    "train.base_training.BaseTraining": "train.BaseTraining",
    "train.module.DrafterTraining": "train.DrafterTraining",
    "train.strategies.FSDP2": "train.FSDP2",
}


def with_new_class_paths(value: Any) -> Any:
    """Replace each class path of an earlier version in a config, at any depth, by the one of today.

    >>> with_new_class_paths({"strategy": {"class_path": "train.strategies.FSDP2"}})
    {'strategy': {'class_path': 'train.FSDP2'}}
    """
    if isinstance(value, dict):
        return {key: with_new_class_paths(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_new_class_paths(inner) for inner in value]
    return NEW_CLASS_PATHS.get(value, value) if isinstance(value, str) else value


def in_arguments(args: list[str]) -> list[str]:
    """Replace the class paths of earlier versions among arguments like ``--KEY PATH`` and ``--KEY=PATH``."""
    replaced = []
    for arg in args:
        key, equals, value = arg.rpartition("=")
        replaced.append(key + equals + with_new_class_paths(value))
    return replaced


def in_configs() -> None:
    """Let jsonargparse replace the class paths of earlier versions in every config that it reads."""
    load = get_loader("yaml")
    if not hasattr(load, "replaces_class_paths"):

        def load_with_new_class_paths(text: str) -> Any:
            return with_new_class_paths(load(text))

        load_with_new_class_paths.replaces_class_paths = True  # type: ignore[attr-defined]
        set_loader("yaml", load_with_new_class_paths, exceptions=(yaml.YAMLError,))
