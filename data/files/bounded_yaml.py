"""Reads YAML from files that may be hostile: a few aliases in a few lines can stand for billions of values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from data.files.regular import UNREADABLE, read_document

MAX_BYTES = 1 << 18  # the parser of PyYAML takes about a second for so many
MAX_NODES = 100_000  # with each alias counted as what it stands for
MAX_DEPTH = 50


class UnboundedYAML(ValueError):
    """A text stands for more values than any config has, or is nested too deeply."""


def check_yaml(text: str) -> None:
    """Raise `UnboundedYAML` if a text exceeds the bounds, or yaml.YAMLError if it is not YAML."""
    if len(text) > MAX_BYTES:
        raise UnboundedYAML(f"more than {MAX_BYTES >> 10} KiB of YAML")
    if max(text.count("["), text.count("{"), text.count("- "), text.count("\n")) < MAX_DEPTH and "&" not in text:
        return  # most values of a command line
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
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
