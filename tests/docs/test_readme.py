"""What the README says to type is typed here."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.S)
SHELL = [line.split("  #")[0].strip() for language, block in BLOCKS if language == "sh" for line in block.splitlines()]


def test_the_two_commands_are_those_that_ci_and_a_new_user_run():
    assert [line for line in SHELL if line.startswith("make")] == ["make quickstart", "make test"]
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_quickstart_ends_in_a_lossless_drafter_and_a_report(tmp_path):
    """The Makefile's own recipe, with fewer steps and questions; the environment is the one that runs the tests."""
    arguments = {
        "BIN": Path(sys.executable).parent,
        "RUN": tmp_path / "run",
        "FIT_ARGS": "--trainer.max_steps 6 --trainer.val_check_interval 6 --data.files [embedded:80] --data.val_size 2 "
        f"--model.max_val_tokens 16 --data.cache_dir {tmp_path / 'cache'}",
        "EVAL_ARGS": "--limit 2 --max-new-tokens 24",
    }
    made = subprocess.run(
        ["make", "-o", "install", "quickstart", *(f"{name}={value}" for name, value in arguments.items())],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert made.returncode == 0, made.stderr[-2000:]
    assert "Nothing is lost" in made.stdout
    for file in ("report.html", "results.json", "results.md", "plots"):
        assert (tmp_path / "run" / "eval" / file).exists()


def test_the_python_example_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (example,) = (block for language, block in BLOCKS if language == "python")
    exec(compile(example, "README", "exec"), {})
    assert len(capsys.readouterr().out.split()) > 5


@pytest.mark.parametrize("line", [line for line in SHELL if line.startswith("drafters ")])
def test_every_drafters_line_parses(line):
    from train.cli import commands

    function, values = commands.parse(shlex.split(line)[1], shlex.split(line)[2:])
    assert callable(function) and values


@pytest.mark.parametrize("line", [line for line in SHELL if line.startswith("lightning ")])
def test_every_lightning_line_parses(line, monkeypatch, capsys):
    from train.cli import lightning_command

    monkeypatch.setattr(sys, "argv", ["lightning"])
    with pytest.raises(SystemExit) as ended:
        lightning_command.main([*shlex.split(line)[1:], "--print_config"])
    assert ended.value.code == 0 and "drafter:" in capsys.readouterr().out


def test_every_folder_and_file_the_map_names_exists():
    table = README.split("## What is where")[1].split("\n## ")[0]
    for name in re.findall(r"^\| `([^`]+)`", table, flags=re.M):
        assert (ROOT / name).exists(), name
