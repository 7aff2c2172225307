"""The ``drafters`` and ``lightning`` commands: their lists, and the one boundary for errors.

Nothing heavy is imported before a command is known, so that the lists of commands are printed at once.
"""

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

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
    "report": Command("inference.commands:report", "make one page of evaluations, or compare two", ("folders",)),
    "verify": Command("inference.commands:verify", "show that a drafter changes no token of what the base writes"),
    "chat": Command("inference.commands:chat", "talk to a base in the terminal and watch its drafter"),
    "serve": Command("inference.serve.command:serve", "serve a base with a drafter, with a page that shows every step"),
    "serve-command": Command(
        "inference.commands:serve_command", "print the command that serves a drafter in vLLM or llama.cpp", ("drafter",)
    ),
    "regenerate": Command("inference.commands:regenerate", "let the base answer the prompts of a data set"),
    "export": Command("train.commands:export", "turn a checkpoint into a drafter folder", ("ckpt", "out")),
    "import": Command("train.commands:import_drafter", "read another tool's drafter", ("folder", "out")),
    "index": Command("inference.commands:index", "count or sort the n-grams of texts for drafters", ("kind", "out")),
    "features": Command("train.commands:features", "write the base's hidden states of conversations for training"),
    "show-mask": Command("train.commands:show_mask", "print conversations with their loss mask in colour"),
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
        place = values.get("out") or next(iter(values.get("folders", ())), None)
        with output_lock(place) if place else nullcontext():
            function(**values)


def parse(name: str, args: Sequence[str]) -> tuple[Callable[..., None], dict[str, Any]]:
    """Return the function of a command, and its arguments as the command line gives them.

    Raises ValueError if the command is unknown, or the arguments do not fit it.
    """
    from train.arguments import parse_arguments

    if name not in COMMANDS:
        raise ValueError(f"unknown command {name!r}: known are {', '.join(COMMANDS)}")
    module, _, attribute = COMMANDS[name].target.partition(":")
    function = getattr(import_module(module), attribute)
    return function, parse_arguments(f"drafters {name}", function, args, COMMANDS[name].positional)


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
