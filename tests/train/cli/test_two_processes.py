"""A second process that would write to the same place is told who writes there, and changes nothing."""

import os
import re
import signal
import time

import pytest

from data.files import output_lock
from train.cli import commands, lightning_command

NONE = "--base nowhere --drafter anpd"  # a place is locked before anything is loaded
LINES = [
    f"eval {NONE} --out @out",
    f"tune {NONE} --space order=2 --out @out",
    "report @out",
    "report one two --out @out",
    "replay --tokenizer nowhere --answers a --questions q --drafter anpd --out @out",
    "regenerate --base nowhere --files embedded --out @out",
    "export nowhere @out",
    "import nowhere @out",
    "features --base nowhere --files embedded --out @out",
    "tokenizer @out",
    "index corpus @out --tokenizer nowhere --files nowhere",
]


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """A place whose lock another process holds, and the id of that process."""
    place = tmp_path_factory.mktemp("held") / "out"
    reader, writer = os.pipe()
    if not (child := os.fork()):
        with output_lock(place):
            os.write(writer, b"held")
            time.sleep(600)
        os._exit(0)
    assert os.read(reader, 4) == b"held"
    yield place, child
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.parametrize("line", LINES)
def test_every_command_that_writes_says_who_holds_its_place(line, held, call):
    place, holder = held
    error = call(commands.main, *line.replace("@out", str(place)).split()).one_line_error("drafters")
    assert re.search(rf"{place} is in use by process {holder} on \S+ since \S+ \S+: wait until it ends, or", error)
    assert not place.exists()


def test_every_command_with_an_output_is_tested():
    without_output = {"chat", "verify", "doctor", "show-mask", "serve", "serve-command", "push"}
    assert {line.split()[0] for line in LINES} == commands.COMMANDS.keys() - without_output


@pytest.mark.slow
def test_a_training_says_who_holds_its_checkpoints(held, call, write_recipe, tmp_path):
    place, holder = held
    folder = ("--trainer.callbacks+=ModelCheckpoint", f"--trainer.callbacks.dirpath={place}")
    outcome = call(lightning_command.main, "fit", "--config", write_recipe(tmp_path), *folder)
    assert outcome.code == 2
    assert f"lightning: error: {place} is in use by process {holder} on" in outcome.err.splitlines()[-1]


@pytest.mark.slow
def test_of_two_searches_at_once_one_finishes_and_the_other_is_refused(fork, call, tiny, tmp_path):
    out = tmp_path / "out"
    options = ("--base", tiny, "--drafter", "anpd", "--space", "order=2..4", "--sampler", "grid")
    line = ("tune", *options, "--limit", 1, "--max-new-tokens", 4, "--out", out)
    first = fork(*line, main=commands.main)
    while not (tmp_path / ".out.lock").exists() and first.is_alive():
        time.sleep(0.01)
    assert f"is in use by process {first.process} on" in call(commands.main, *line).one_line_error("drafters")
    assert first.wait() == 0, first.log.read_text()
    again = call(commands.main, *line)
    assert again.code == 0 and "the 3 best trials" in again.out and not (tmp_path / ".out.lock").exists()
