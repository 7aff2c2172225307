"""The ``lightning`` command: a LightningCLI over the project's modules, data and configs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from data.tokenizer import shipped_folder

CONFIGS = shipped_folder("configs")

HELP = """usage: lightning {fit,validate,test} --config NAME.yaml [--config OVERLAY.yaml ...] [--KEY VALUE ...]

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


def find_config(name: str) -> str:
    """Return the path of a config: a file of that name, or else the config of that name in configs/.

    Raises:
        ValueError: Neither exists.
    """
    path = Path(name)
    if path.is_file():
        return name
    if (CONFIGS / path).is_file():
        return str(CONFIGS / path)
    known = ", ".join(sorted(str(p.relative_to(CONFIGS)) for p in CONFIGS.rglob("*.yaml")))
    raise ValueError(f"no config {name!r}: give a file, or one of configs/: {known}")


def with_found_configs(args: list[str]) -> list[str]:
    """Replace the name after each ``--config`` or ``-c`` by the config's path."""
    result, takes_config = [], False
    for arg in args:
        arg = "--config" if arg == "-c" else arg
        if takes_config:
            arg = find_config(arg)
        elif arg.startswith("--config="):
            arg = "--config=" + find_config(arg.removeprefix("--config="))
        takes_config = arg == "--config"
        result.append(arg)
    return result


def main(argv: list[str] | None = None) -> None:
    """Run the command; a user's mistake ends it with one line and exit code 2."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return
    from train.cli.errors import user_errors

    try:
        with user_errors("lightning"):
            args_with_paths = with_found_configs(args)
            from train.cli.lightning_cli import run

            run(args_with_paths, command=shlex.join(["lightning", *args]))
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit as stopped:
        if isinstance(stopped.__context__, KeyboardInterrupt):  # before the first step, where Lightning exits with 1
            sys.exit(130)
        raise
