"""Reads the arguments of both commands and of the benchmarks with jsonargparse.

No name is abbreviated, the nearest of a misspelt one is named, and aliases in YAML are bounded.
"""

import re
from argparse import ArgumentError
from collections.abc import Callable, Collection, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from inspect import signature
from itertools import chain
from typing import Any, NoReturn, get_type_hints

import yaml
from jsonargparse import ArgumentParser, get_loader, set_loader

# How jsonargparse names an option that does not exist, on the command line and in a config.
UNKNOWN = re.compile(
    r"unrecognized arguments: --(?P<option>[\w.-]+)"
    r"|(Group '(?P<group>[\w.]+)' does not accept option|Option) '(?P<key>[\w.-]+)'( is not accepted)?"
)
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
            if near := near or get_close_matches(name, options, 1, cutoff=0.75):
                message = f"{message[: match.end()]}: did you mean --{near[0]}?"
        super().error(message.partition(". Got value: Namespace(")[0], ex)  # the names of the parser's own classes


def load_bounded(text: str) -> Any:
    """Load YAML as jsonargparse does, without many aliases: nested ones may stand for any number of values."""
    if text.count("*") > MAX_ALIASES < sum(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
        raise yaml.YAMLError(f"more than {MAX_ALIASES} aliases (*): write out what they stand for")
    return load_yaml(text)


# ---- commands of drafters


def parse_arguments(
    command: str, function: Callable[..., None], args: Sequence[str], positional: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the arguments of a command's function as a command line gives them; raises ValueError if they do not fit.

    A parameter that is a dataclass is read as one flat option for each of its fields: ``--base``, not ``--model.base``.
    A list is written as one value in brackets, or as repeated options; either replaces the default.
    """
    groups, hints = option_groups(function), get_type_hints(function)
    parser = ExactParser(prog=command, description=(function.__doc__ or "").partition("Args:")[0])
    for group in groups.values():
        hints |= get_type_hints(group)
        parser.add_class_arguments(group, as_group=False)
    parser.add_function_arguments(function, skip=set(groups), as_group=False)
    lists = {option for option, hint in hints.items() if "list[" in str(hint)}
    flags = {option for option, hint in hints.items() if hint is bool}
    words = spelled_out(args, positional, lists, flags)
    given = lists.intersection(word[2:].partition("+=")[0] for word in words)
    parser.set_defaults({option: [] for option in given if parser.get_default(option)})
    try:
        values = vars(parser.parse_args(words))
    except ArgumentError as error:
        raise ValueError(f"{in_words(str(error))} ({command} --help lists the arguments)") from error
    if values.get("out") == "":
        raise ValueError("--out has an empty name: name a file or folder")
    return grouped(function, values)


def in_words(message: str) -> str:
    """What jsonargparse says of a value of another type, in few words; any other message as it is."""
    match = re.search(
        r'Parser key "(.+?)":(.*Expected an? .*?)(?:Given value type.*)?G\w+ value: (.*)', message, re.DOTALL
    )
    if not match:
        return message
    kinds = re.findall(r"<class '(?!NoneType)(\w+)|Literal\[(.+?)\]", match[2])
    expected = dict.fromkeys(class_name or literals for class_name, literals in kinds)
    return f"{match[1]} must be {' or '.join(expected)}, not {match[3]}"


def spelled_out(
    args: Sequence[str], positional: Sequence[str], lists: Collection[str], flags: Collection[str]
) -> list[str]:
    """Return arguments in the form that jsonargparse reads: ``--key=value``, or ``--key+=value`` for an item of a list.

    Hyphens in names become underscores, a flag without a value becomes true, and arguments without a name get the next
    positional one, the last of which may be a list.
    """
    if not {"-h", "--help"}.isdisjoint(args):
        return ["--help"]
    result: list[str] = []
    words, names = list(args), [*positional]
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            if not names:
                raise ValueError(f"{word!r} follows no option: an option that takes several is repeated")
            word = f"--{names[0]}={word}"
            names = names if names[0] in lists else names[1:]
        key, equals, value = word[2:].partition("=")
        name = key.replace("-", "_")
        if not equals and name in flags:
            value = words.pop(0) if words and words[0].lower() in ("true", "false") else "true"
        elif not equals and words:
            value = words.pop(0)
        elif not equals:
            return [*result, f"--{name}"]  # which jsonargparse refuses, as the value is missing
        result.append(f"--{name}{'+' if name in lists else ''}={value}")
    return result


def option_groups(function: Callable[..., Any]) -> dict[str, type]:
    """Return the parameters of a command that are dataclasses of shared options, such as ``model: ModelOptions``."""
    hints = get_type_hints(function)
    return {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}


def grouped(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a command as its signature has them; ``options`` has them as flat as a command line.

    Options that are missing have their default values.
    """
    arguments = dict(options)
    groups = {
        name: group(**{field: arguments.pop(field) for field in signature(group).parameters if field in arguments})
        for name, group in option_groups(function).items()
    }
    return arguments | groups
