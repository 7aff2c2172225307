"""The parser of both commands: no name is abbreviated, the nearest of a misspelt one is named, aliases are bounded."""

import re
from difflib import get_close_matches
from itertools import chain
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, get_loader, set_loader

# How jsonargparse names an option that does not exist, on the command line and in a config.
UNKNOWN = re.compile(
    r"unrecognized arguments: --(?P<option>[\w.-]+)"
    r"|(Group '(?P<group>[\w.]+)' does not accept option|Option) '(?P<key>[\w.-]+)'( is not accepted)?"
)
RENAMED = {"endpoint": "server"}  # options of earlier versions
MAX_ALIASES = 20  # of a config
load_yaml = get_loader("yaml")


class ExactParser(ArgumentParser):
    """A parser without abbreviations; jsonargparse makes the parsers of a class's own options of the same type."""

    def __init__(self, *args: Any, **options: Any) -> None:
        set_loader("yaml", load_bounded, (yaml.YAMLError,))
        super().__init__(*args, **options | {"exit_on_error": False, "allow_abbrev": False})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise ArgumentError; a message about an unknown option ends with the nearest known one."""
        if (match := UNKNOWN.search(message)) and "did you mean" not in message:
            inner = (action.choices.values() for action in self._actions if isinstance(action.choices, dict))
            parsers = [self, *chain.from_iterable(inner)]
            options = [option.lstrip("-") for parser in parsers for option in parser._option_string_actions]
            name = ".".join(part for part in (match["group"], match["option"] or match["key"]) if part)
            near = [option for option in options if option.startswith(name)]
            near = near or get_close_matches(name, options, 1, cutoff=0.75)
            if near := [RENAMED[name]] if name in RENAMED else near:
                message = f"{message[: match.end()]}: did you mean --{near[0]}?"
        super().error(message.partition(". Got value: Namespace(")[0], ex)  # the names of the parser's own classes


def load_bounded(text: str) -> Any:
    """Load YAML as jsonargparse does, without many aliases: nested ones may stand for any number of values."""
    if text.count("*") > MAX_ALIASES < sum(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
        raise yaml.YAMLError(f"more than {MAX_ALIASES} aliases (*): write out what they stand for")
    return load_yaml(text)
