"""The ``drafters`` command. Every subcommand is a typed function, and its docstring is the help."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, NamedTuple

from train.cli import lightning_command


class Command(NamedTuple):
    """A subcommand: a typed function whose docstring is the help.

    Args:
        module: Module of the function.
        function: Name of the function.
        summary: Line in the list of commands.
        positional: Options that may be given by position; a list takes all arguments that are left.
    """

    module: str
    function: str
    summary: str
    positional: tuple[str, ...] = ()


COMMANDS = {
    "eval": Command(
        "inference.evaluation.evaluate",
        "evaluate",
        "measure drafters side by side on the benchmarks of the papers or our own",
    ),
    "sweep": Command(
        "inference.tuning.sweep", "sweep", "measure a drafter over a grid of its arguments, with heat maps"
    ),
    "chat": Command("inference.chat.command", "chat", "talk to a base in the terminal and watch its drafter"),
    "report": Command(
        "inference.reporting.report",
        "report",
        "make one page of several evaluations, or recount recorded answers by every convention",
        ("folders",),
    ),
    "leaderboard": Command(
        "inference.reporting.leaderboard",
        "leaderboard",
        "make one page with the drafters of many evaluations, to sort, filter and compare",
        ("folders",),
    ),
    "replay": Command(
        "inference.replay",
        "replay",
        "measure n-gram drafters exactly on recorded answers, without a base",
    ),
    "verify": Command("inference.verify", "verify", "show that a drafter changes no token of what the base writes"),
    "regenerate": Command(
        "inference.regenerate.regenerate",
        "regenerate",
        "let the base answer the prompts of a data set itself, to train on its own text",
    ),
    "export": Command(
        "train.export.export", "export", "turn a training checkpoint into a drafter folder", ("ckpt", "out")
    ),
    "push": Command(
        "train.export.push",
        "push",
        "put an exported drafter on the Hugging Face hub, with a card of what was measured",
        ("folder", "repository"),
    ),
    "import": Command(
        "train.export.import_drafter",
        "import_drafter",
        "turn a drafter that another tool trained into a drafter folder",
        ("folder", "out"),
    ),
    "serve": Command(
        "inference.serve.command",
        "serve",
        "serve a base with a drafter through OpenAI's API, with a web page that shows every step",
    ),
    "serve-command": Command(
        "inference.vllm.command",
        "serve_command",
        "print the command that serves a base with a drafter in vLLM",
        ("drafter",),
    ),
    "doctor": Command(
        "train.export.doctor",
        "doctor",
        "compare an exported drafter with the checkpoint it was made from",
        ("ckpt", "export"),
    ),
    "show-mask": Command("train.tools.show_mask", "show_mask", "print conversations with their loss mask in colour"),
    "features": Command(
        "train.feature_store.features",
        "features",
        "write the base's hidden states of conversations for training",
    ),
    "tokenizer": Command("train.tools.tokenizer", "tokenizer", "train a small tokenizer on conversations", ("out",)),
    "corpus": Command(
        "inference.indexes.corpus",
        "corpus",
        "count the n-grams of text files into a corpus cache for self_draft, joint and corpus",
        ("out",),
    ),
    "datastore": Command(
        "inference.indexes.datastore",
        "datastore",
        "sort text files into the datastore of the drafter rest",
        ("out",),
    ),
    "ouroboros-search": Command(
        "inference.tuning.ouroboros_search",
        "ouroboros_search",
        "search the hyper-parameters of ouroboros",
    ),
    "step-cost": Command(
        "inference.tuning.step_cost",
        "step_cost",
        "measure the time of a decoding step by the size of the draft tree",
    ),
    "tree-search": Command(
        "train.tools.tree_search", "tree_search", "make Medusa's static tree by its heads' accuracies"
    ),
    "skip-search": Command(
        "inference.tuning.skip_search",
        "skip_search",
        "search which sublayers of the base self_speculative skips",
    ),
}
TRAIN = "train a drafter: the same as lightning fit"
HELP = """usage: drafters COMMAND [--KEY VALUE ...]

{rows}

drafters COMMAND --help explains each. Training: lightning --help
"""


def normalise(
    args: list[str], repeated: set[str], positional: Sequence[str], flags: Collection[str] = frozenset()
) -> list[str]:
    """Bring arguments into the form ``--key=value``, or ``--key+=value`` for an option that may be repeated.

    Hyphens in names become underscores, a flag without a value becomes ``true``, and arguments without a name get the
    next positional one. The last positional option may be repeated.

    Args:
        args: Arguments as the user wrote them.
        repeated: Names of options that may be repeated.
        positional: Names of positional options.
        flags: Names of boolean options.

    Raises:
        ValueError: A second value follows an option that takes one value at a time.
    """
    result: list[str] = []
    previous = ""  # the repeated option that the argument before belongs to
    names = iter(positional)
    remaining = list(args)
    while remaining:
        arg = remaining.pop(0)
        if arg in ("-h", "--help"):
            return ["--help"]
        if not arg.startswith("--"):
            name = next(names, next((last for last in positional[-1:] if last in repeated), None))
            if not name and previous:
                raise ValueError(f"--{previous} takes one value at a time: write --{previous} again before {arg}")
            result += [f"--{name}+={arg}" if name in repeated else f"--{name}={arg}"] if name else [arg]
            continue
        key, equals, value = arg.partition("=")
        key = key.replace("-", "_").replace("__", "--", 1)
        name = key.removeprefix("--")
        if not equals:
            if name in flags and (not remaining or remaining[0].lower() not in ("true", "false")):
                value = "true"
            elif remaining:
                value = remaining.pop(0)
            else:
                return [*result, key]
        result.append(f"{key}+={value}" if name in repeated else f"{key}={value}")
        previous = name if name in repeated else ""
    return result


def main(argv: list[str] | None = None) -> None:
    """Run a subcommand; a user's mistake ends it with one line and exit code 2."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help", "help"):
        summaries = {"train": TRAIN} | {name: command.summary for name, command in COMMANDS.items()}
        print(HELP.format(rows="\n".join(f"  {name:<16} {text}" for name, text in summaries.items())), end="")
        return
    if args[0] == "train":
        lightning_command.main(["fit", *args[1:]])
        return
    from train.cli.errors import user_errors

    with user_errors("drafters"):
        function, values = parse(args[0], args[1:])
        with lock_of(COMMANDS[args[0]], values):
            function(**values)


def lock_of(command: Command, values: dict[str, Any]) -> AbstractContextManager[None]:
    """Return the lock of the place that a command writes to, or a context that does nothing without one."""
    from data.files import output_lock

    # Without --out, `report` writes into the folder that it reads.
    place = values.get("out") or next(iter(values.get("folders") or ()), None)
    return output_lock(place) if place else nullcontext()


def option_groups(function: Callable[..., None]) -> dict[str, type]:
    """Return the parameters of a command that are dataclasses of shared options, such as ``model: ModelOptions``."""
    from dataclasses import is_dataclass
    from typing import get_type_hints

    hints = get_type_hints(function)
    return {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}


def grouped(function: Callable[..., None], options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a command as its signature names them; ``options`` has them as flat as a command line.

    Options that are missing have their default values.
    """
    from inspect import signature

    arguments = dict(options)
    groups = {
        name: group(**{field: arguments.pop(field) for field in signature(group).parameters if field in arguments})
        for name, group in option_groups(function).items()
    }
    return arguments | groups


def parse(command: str, args: list[str]) -> tuple[Callable[..., None], dict[str, Any]]:
    """Return the function of a subcommand, and its arguments as the command line gives them.

    A parameter that is a dataclass is read as one flat option for each of its fields: ``--base``, not ``--model.base``.

    Raises:
        ValueError: The command is unknown, or the arguments do not fit it.
    """
    from typing import get_type_hints

    from jsonargparse import ArgumentParser

    from train.cli.wrong_values import in_plain_words

    if command not in COMMANDS:
        raise ValueError(f"unknown command {command!r}: known are {', '.join(['train', *COMMANDS])}")
    function = getattr(import_module(COMMANDS[command].module), COMMANDS[command].function)
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
        values = vars(parser.parse_args(normalise(args, repeated, COMMANDS[command].positional, flags)))
    except Exception as error:  # errors of argparse, jsonargparse and types are all about the user's arguments
        raise ValueError(
            f"{command}: {in_plain_words(str(error))} (drafters {command} --help lists the arguments)"
        ) from error
    if values.get("out") == "":
        raise ValueError(f"{command}: --out has an empty name: name a file or folder")
    return function, grouped(function, dict(values))
