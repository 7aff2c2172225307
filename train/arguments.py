"""The parser of both commands: no name is abbreviated, the nearest of a misspelt one is named, aliases are bounded."""

import re
from difflib import get_close_matches
from math import inf
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, get_loader, set_loader

# How jsonargparse names an option that does not exist, on the command line and in a config.
UNKNOWN = re.compile(
    r"unrecognized arguments: --(?P<option>[\w.-]+)"
    r"|(Group '(?P<group>[\w.]+)' does not accept option|Option) '(?P<key>[\w.-]+)'( is not accepted)?"
)
MAX_VALUES = 100_000  # of a config, aliases written out
load_yaml = get_loader("yaml")


class ExactParser(ArgumentParser):
    """A parser without abbreviations; jsonargparse makes the parsers of a class's own options of the same type."""

    def __init__(self, *args: Any, **options: Any) -> None:
        set_loader("yaml", load_bounded, (yaml.YAMLError,))
        super().__init__(*args, **options | {"exit_on_error": False, "allow_abbrev": False})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise ArgumentError; a message about an unknown option ends with the nearest known one."""
        if (found := UNKNOWN.search(message)) and "did you mean" not in message:
            subparsers = (action.choices for action in self._actions if isinstance(action.choices, dict))
            parsers = [self, *(parser for each in subparsers for parser in each.values())]
            known = [option.lstrip("-") for parser in parsers for option in parser._option_string_actions]
            name = ".".join(part for part in (found["group"], found["option"] or found["key"]) if part)
            begun = [option for option in known if option.startswith(name)]
            if near := begun or get_close_matches(name, known, 1, cutoff=0.75):
                message = f"{message[: found.end()]}: did you mean --{near[0]}?"
        super().error(message, ex)


def load_bounded(text: str) -> Any:
    """Load YAML as jsonargparse does, unless its aliases stand for too many values."""
    if "&" in text and "*" in text and num_values(yaml.compose(text, yaml.SafeLoader), {}) > MAX_VALUES:
        raise yaml.YAMLError(f"its aliases stand for more than {MAX_VALUES:,} values: write out what is meant")
    return load_yaml(text)


def num_values(node: Any, sizes: dict[int, float]) -> float:
    """Return how many values a node of YAML is with its aliases written out; ``sizes`` has those counted before."""
    if id(node) not in sizes:
        sizes[id(node)] = inf  # of an alias inside what it stands for
        inner = node.value if isinstance(node, yaml.CollectionNode) else ()
        parts = [part for entry in inner for part in (entry if isinstance(entry, tuple) else (entry,))]
        sizes[id(node)] = 1 + sum(num_values(part, sizes) for part in parts)
    return sizes[id(node)]
