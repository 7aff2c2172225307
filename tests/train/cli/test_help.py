"""Lists of commands, their help, and the answer to a misspelt option, without the libraries that a run needs."""

import subprocess
import sys

from train.cli import COMMANDS

HEAVY = {"torch", "transformers", "lightning", "numpy", "pandas", "matplotlib", "datasets", "openai"}
CODE = f"""
import sys
from train.cli import COMMANDS, run_drafters, run_lightning
run_drafters([])
run_lightning([])
for name in COMMANDS:
    for option in ("--help", "--misspelt"):
        try:
            run_drafters([name, option, "x"])
        except SystemExit as end:
            print(name, option, end.code)
print(*{HEAVY} & sys.modules.keys())
"""


def test_lists_help_and_a_misspelt_option_of_every_command_import_no_heavy_library(repository):
    done = subprocess.run([sys.executable, "-c", CODE], cwd=repository, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert lines[-1] == "", "a library was imported"
    assert all(f"{name} --help 0" in lines and f"{name} --misspelt 2" in lines for name in COMMANDS)
    assert len(done.stderr.splitlines()) == len(COMMANDS), "one line for each misspelt option"
