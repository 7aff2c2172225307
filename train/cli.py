"""The ``drafters`` and ``lightning`` commands: their lists, their arguments, and the one boundary for errors.

Nothing heavy is imported before a command is known, so that the lists of commands are printed at once.
"""

import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from data.files import explained, output_lock
from data.hub import shipped_folder
from data.safe_text import print_traceback, safe_line, safe_messages


class Command(NamedTuple):
    """A command: a typed function whose docstring is the help."""

    target: str  # MODULE:FUNCTION
    summary: str  # line in the list of commands
    positional: tuple[str, ...] = ()  # options that may be given by position; a list takes all arguments that are left


COMMANDS = {
    "eval": Command("inference.commands:evaluate", "measure drafters side by side on benchmarks"),
    "tune": Command("inference.commands:tune", "search the options of a drafter for speed or acceptance"),
    "report": Command(
        "inference.commands:report",
        "make one page of evaluations, compare two, or recount answers",
        ("folders",),
    ),
    "verify": Command("inference.commands:verify", "show that a drafter changes no token of what the base writes"),
    "chat": Command("inference.commands:chat", "talk to a base in the terminal and watch its drafter"),
    "serve": Command("inference.commands:serve", "serve a base with a drafter, with a page that shows every step"),
    "serve-command": Command(
        "inference.commands:serve_command", "print the command that serves a drafter in vLLM", ("drafter",)
    ),
    "regenerate": Command("inference.commands:regenerate", "let the base answer the prompts of a data set"),
    "export": Command(
        "train.commands:export", "turn a checkpoint into a drafter folder, or publish it", ("ckpt", "out")
    ),
    "import": Command("train.commands:import_drafter", "read another tool's drafter", ("folder", "out")),
    "index": Command("inference.commands:index", "count or sort the n-grams of texts for drafters", ("kind", "out")),
    "features": Command("train.commands:features", "write the base's hidden states of conversations for training"),
    "show-mask": Command("train.commands:show_mask", "print conversations with their loss mask in colour"),
    "replay": Command("inference.commands:replay", "measure n-gram drafters on recorded answers, without a base"),
}
HELP = """usage: drafters COMMAND [--KEY VALUE ...]

{commands}

drafters COMMAND --help explains each; --traceback shows where an error arose. Training: lightning --help
"""
LIGHTNING_HELP = """\
usage: lightning {fit,validate,test} --config NAME.yaml [--config OVERLAY.yaml ...] [--KEY VALUE ...]

Train learned drafters for speculative decoding on a frozen base.

  fit        train; validation simulates decoding and logs the acceptance length
  validate   the acceptance length of a checkpoint (--ckpt_path) on held-out text
  test       the same as validate, logged as a test

A bare config name is looked up in configs/; later configs and --KEY VALUE override earlier ones.
  lightning fit --config ctc.yaml --model.base DIR_OR_HUB_ID --data.files '[my.json]'
  lightning fit --config ctc.yaml --config debug.yaml
  lightning fit --config ctc.yaml --ckpt_path last           go on where a run stopped
  lightning fit --config ctc.yaml --print_config             what would run
  lightning fit --help                                       every key
Other commands (export, eval, verify, show-mask): drafters --help
"""
CONFIGS = shipped_folder("configs")
ASKS_FOR_HELP = "-h", "--help", "help"
TRACEBACK = "--traceback"


# ---- the boundary


@contextmanager
def user_errors(command: str, shows_traceback: bool = False, to_continue: str = "repeat the command") -> Iterator[None]:
    """End the process with one line and exit code 2 for an error that a user can fix, and 130 for Ctrl-C or SIGTERM.

    These are ValueError, the system's errors and Lightning's misconfigurations. All other errors are bugs and raise;
    with ``shows_traceback`` or the environment variable DRAFTERS_DEBUG=1, the user's errors raise too. The line begins
    with the command, and ``to_continue`` says how one goes on that was stopped.
    """
    try:
        with safe_messages():
            yield
    except (KeyboardInterrupt, SystemExit) as stopped:
        if isinstance(stopped, SystemExit) and not isinstance(stopped.__context__, KeyboardInterrupt):
            raise  # Lightning turns Ctrl-C before the first step into an exit with code 1
        print(f"\n{command}: stopped: {to_continue} to go on", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        # By name, because importing Lightning takes seconds and most commands do without it.
        is_users = isinstance(error, (ValueError, OSError)) or type(error).__name__ == "MisconfigurationException"
        if not is_users or shows_traceback or os.environ.get("DRAFTERS_DEBUG") == "1":
            sys.excepthook = print_traceback  # which runs after this function
            raise
        # A process that loads batches passes its error on with the traceback before it.
        said = explained(error).rpartition(f"\n{type(error).__name__}: ")[2].split()
        print(safe_line(f"{command}: error: {' '.join(said)}"), file=sys.stderr)
        sys.exit(2)


# ---- drafters


def run_drafters(argv: list[str] | None = None) -> None:
    """Run a ``drafters`` command."""
    name, *args = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ASKS_FOR_HELP:
        rows = (f"  {name:<16} {command.summary}" for name, command in COMMANDS.items())
        print(HELP.format(commands="\n".join(rows)), end="")
        return
    to_continue = "repeat the command" + " without --overwrite" * ({"eval", "--overwrite"} <= {name, *args})
    with user_errors(f"drafters {name}" if name in COMMANDS else "drafters", TRACEBACK in args, to_continue):
        function, values = parse(name, [arg for arg in args if arg != TRACEBACK])
        if argv is None and "out" in values:  # what is written can be continued, and a server has its own handler
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        # Without --out, `report` writes into the folder that it reads.
        place = values.get("out") or next(iter(values.get("folders") or ()), None)
        with output_lock(place) if place else nullcontext():
            function(**values)


def parse(name: str, args: Sequence[str]) -> tuple[Callable[..., None], dict[str, Any]]:
    """Return the function of a command, and its arguments as the command line gives them.

    A parameter that is a dataclass is read as one flat option for each of its fields: ``--base``, not ``--model.base``.
    Raises ValueError if the command is unknown, or the arguments do not fit it.
    """
    from argparse import ArgumentError

    from train.arguments import ExactParser

    if name not in COMMANDS:
        raise ValueError(f"unknown command {name!r}: known are {', '.join(COMMANDS)}")
    module, _, attribute = COMMANDS[name].target.partition(":")
    function = getattr(import_module(module), attribute)
    groups, hints = option_groups(function), get_type_hints(function)
    for group in groups.values():
        hints |= get_type_hints(group)
    about = (function.__doc__ or "").partition("Args:")[0]
    parser = ExactParser(prog=f"drafters {name}", description=about)
    for group in groups.values():
        parser.add_class_arguments(group, as_group=False)
    parser.add_function_arguments(function, skip=set(groups), as_group=False)
    lists = {option for option, hint in hints.items() if "list[" in str(hint)}
    flags = {option for option, hint in hints.items() if hint is bool}
    try:
        values = vars(parser.parse_args(spelled_out(args, COMMANDS[name].positional, lists, flags)))
    except ArgumentError as error:
        raise ValueError(f"{in_words(str(error))} (drafters {name} --help lists the arguments)") from error
    if values.get("out") == "":
        raise ValueError("--out has an empty name: name a file or folder")
    return function, grouped(function, values)


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


# ---- lightning


def run_lightning(argv: list[str] | None = None) -> None:
    """Run ``lightning fit``, ``validate`` or ``test``."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ASKS_FOR_HELP:
        print(LIGHTNING_HELP, end="")
        return
    command = shlex.join(["lightning", *args])
    with user_errors("lightning", TRACEBACK in args, "repeat it with --ckpt_path last"):
        words = with_found_configs([arg for arg in args if arg != TRACEBACK])
        from train.lightning_cli import run

        run(words, command)


def with_found_configs(args: Sequence[str]) -> list[str]:
    """Replace the name after each ``--config`` or ``-c`` by the config's path."""
    result: list[str] = []
    for arg in args:
        if result and result[-1] in ("-c", "--config"):
            arg = find_config(arg)
        elif arg.startswith("--config="):
            arg = f"--config={find_config(arg.removeprefix('--config='))}"
        result.append(arg)
    return result


def find_config(name: str) -> str:
    """Return the path of a config: a file of that name, or else the one in configs/; ValueError if there is neither."""
    if not Path(name).is_file() and not (CONFIGS / name).is_file():
        shipped = ", ".join(sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yaml")))
        raise ValueError(f"no config {name!r}: give a file, or one of configs/: {shipped}")
    return name if Path(name).is_file() else str(CONFIGS / name)
