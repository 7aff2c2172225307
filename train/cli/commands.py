"""The ``drafters`` command: every subcommand is a typed function; its docstring is the help."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any

COMMANDS = {
    "eval": (
        "inference.evaluation.evaluate",
        "evaluate",
        "measure drafters side by side on the benchmarks of the papers or our own",
    ),
    "sweep": ("inference.tuning.sweep", "sweep", "measure a drafter over a grid of its arguments, with heat maps"),
    "chat": ("inference.chat.command", "chat", "talk to a base in the terminal and watch its drafter"),
    "report": (
        "inference.reporting.report",
        "report",
        "make one page of several evaluations, or recount recorded answers by every convention",
    ),
    "replay": (
        "inference.replay.replay",
        "replay",
        "measure n-gram drafters exactly on recorded answers, without a base",
    ),
    "verify": ("inference.evaluation.verify", "verify", "show that a drafter changes no token of what the base writes"),
    "regenerate": (
        "inference.regeneration.regenerate",
        "regenerate",
        "let the base answer the prompts of a data set itself, to train on its own text",
    ),
    "export": ("train.export.export", "export", "turn a training checkpoint into a drafter folder"),
    "doctor": ("train.export.doctor", "doctor", "compare an exported drafter with the checkpoint it was made from"),
    "show-mask": ("train.tools.show_mask", "show_mask", "print conversations with their loss mask in colour"),
    "features": (
        "train.feature_store.features",
        "features",
        "write the base's hidden states of conversations for training",
    ),
    "tokenizer": ("train.tools.tokenizer", "tokenizer", "train a small tokenizer on conversations"),
    "corpus": (
        "inference.indexes.corpus",
        "corpus",
        "count the n-grams of text files into a corpus cache for self_draft, joint and corpus",
    ),
    "datastore": ("inference.indexes.datastore", "datastore", "sort text files into the datastore of the drafter rest"),
    "ouroboros-search": (
        "inference.tuning.ouroboros_search",
        "ouroboros_search",
        "search the hyper-parameters of ouroboros",
    ),
    "step-cost": (
        "inference.tuning.step_cost",
        "step_cost",
        "measure what a step of the base costs by the nodes it feeds",
    ),
    "tree-search": ("train.tools.tree_search", "tree_search", "make Medusa's static tree by its heads' accuracies"),
    "skip-search": (
        "inference.tuning.skip_search",
        "skip_search",
        "search what self_speculative lets the base leave out",
    ),
}
POSITIONAL = {
    "report": ["folders"],
    "export": ["ckpt", "out"],
    "doctor": ["ckpt", "export"],
    "tokenizer": ["out"],
    "corpus": ["out"],
    "datastore": ["out"],
}
HELP = """usage: drafters COMMAND [--KEY VALUE ...]

{rows}

drafters COMMAND --help explains each. Training: lightning --help
"""


def normalised(
    args: list[str], repeated: set[str], positional: list[str], flags: Collection[str] = frozenset()
) -> list[str]:
    """``--max-new-tokens`` for max_new_tokens, ``--drafter a --drafter b`` for a list, ``CKPT OUT`` by position, where
    the last may be repeated, ``--overwrite`` for ``--overwrite true``.

    Raises:
        ValueError: A second value stands behind an option that takes one at a time.
    """
    result: list[str] = []
    before = ""  # the repeated option whose value was read last
    places = iter(positional)
    left = list(args)
    while left:
        arg = left.pop(0)
        if arg in ("-h", "--help"):
            return ["--help"]
        if not arg.startswith("--"):
            name = next(places, next((last for last in positional[-1:] if last in repeated), None))
            if not name and before:
                raise ValueError(f"--{before} takes one value at a time: write --{before} again before {arg}")
            result += [f"--{name}+={arg}" if name in repeated else f"--{name}={arg}"] if name else [arg]
            continue
        key, equals, value = arg.partition("=")
        key = key.replace("-", "_").replace("__", "--", 1)
        name = key.removeprefix("--")
        if not equals:
            if name in flags and (not left or left[0].lower() not in ("true", "false")):
                value = "true"
            elif left:
                value = left.pop(0)
            else:
                return [*result, key]
        result.append(f"{key}+={value}" if name in repeated else f"{key}={value}")
        before = name if name in repeated else ""
    return result


def main(argv: list[str] | None = None) -> None:
    """Run a subcommand; a mistake of the user ends in one line and exit code 2."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help", "help"):
        rows = "\n".join(f"  {name:<16} {line}" for name, (_, _, line) in COMMANDS.items())
        print(HELP.format(rows=rows), end="")
        return
    from train.cli.errors import user_errors

    with user_errors("drafters"):
        function, values = parse(args[0], args[1:])
        function(**values)


def option_groups(function: Callable[..., None]) -> dict[str, type]:
    """The parameters of a command that are dataclasses of shared options, such as ``model: ModelOptions``."""
    from dataclasses import is_dataclass
    from typing import get_type_hints

    return {name: hint for name, hint in get_type_hints(function).items() if is_dataclass(hint)}


def parse(command: str, args: list[str]) -> tuple[Callable[..., None], dict[str, Any]]:
    """Return the function of a subcommand and its arguments, which ``args`` gives as its signature names them.

    A parameter that is a dataclass is read as one flat option for each of its fields: ``--base``, not ``--model.base``.

    Raises:
        ValueError: The command is unknown, or the arguments do not fit it.
    """
    from typing import get_type_hints

    from jsonargparse import ArgumentParser

    from train.cli.wrong_values import in_plain_words

    if command not in COMMANDS:
        raise ValueError(f"unknown command {command!r}: known are {', '.join(COMMANDS)}")
    module, name, _ = COMMANDS[command]
    function = getattr(import_module(module), name)
    groups = option_groups(function)
    hints = {name: hint for name, hint in get_type_hints(function).items() if name not in groups}
    for group in groups.values():
        hints |= get_type_hints(group)
    repeated = {argument for argument, hint in hints.items() if "list[" in str(hint)}
    flags = {argument for argument, hint in hints.items() if hint is bool}
    about = function.__doc__.split("Args:")[0]
    parser = ArgumentParser(prog=f"drafters {command}", exit_on_error=False, allow_abbrev=False, description=about)
    for group in groups.values():
        parser.add_class_arguments(group, as_group=False)
    parser.add_function_arguments(function, skip=set(groups), as_group=False)
    try:
        values = parser.parse_args(normalised(args, repeated, POSITIONAL.get(command, []), flags))
    except Exception as error:  # argparse, jsonargparse and type errors alike are the user's arguments
        raise ValueError(
            f"{command}: {in_plain_words(str(error))} (drafters {command} --help lists the arguments)"
        ) from error
    for name, group in groups.items():
        values[name] = group(**{field: values.pop(field) for field in group.__dataclass_fields__})
    return function, values
