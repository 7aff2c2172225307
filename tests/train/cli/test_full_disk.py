"""On a full disk every command that writes ends in one line, and what was there before is unchanged."""

import json
import resource
import signal
from contextlib import contextmanager
from dataclasses import replace

import pytest

from drafters import checkpoint
from drafters.checkpoint import DrafterConfig
from inference.verifier.base import tokenizer_hash
from train.cli import commands, lightning_command
from train.export import vllm

QUICK = ("--benchmark", "embedded", "--limit", 1, "--max-new-tokens", 8)
ONCE = {"eval": ("--repeats", 1)}


@contextmanager
def full_disk(num_bytes):
    """No file can grow beyond a number of bytes, as if the disk were full then."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)


def contents(place):
    """The files of an output, without journals, whose entries --overwrite drops."""
    files = {path.relative_to(place): path for path in place.rglob("*") if path.is_file()}
    journals = ("*.partial", "journal/*", "*.search.jsonl", "cells.jsonl")
    return {name: path.read_bytes() for name, path in files.items() if not any(map(path.match, journals))}


@pytest.fixture(scope="module")
def inputs(tiny_tokenizer, tiny_base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    said = "the cat sat on the mat and looked at the other cat"
    (folder / "text.txt").write_text(f"{said}\n\n" * 9)
    count = len(tiny_tokenizer(said).input_ids) + 1
    question = {"question_id": 1, "category": "x", "turns": ["hello"]}
    answer = {"question_id": 1, "choices": [{"turns": [said], "new_tokens": [count], "idxs": [9]}]}
    (folder / "answers.jsonl").write_text(json.dumps(answer))
    (folder / "questions.jsonl").write_text(json.dumps(question))
    medusa = DrafterConfig(
        "drafters.Medusa", {"num_heads": 2}, tiny_base.shape, tiny_base.name, tokenizer_hash(tiny_tokenizer)
    )
    checkpoint.save(folder / "medusa", medusa.build(), medusa)
    eagle = replace(medusa, class_path="drafters.EAGLE", init_args={"fc_bias": False})
    (folder / "public").mkdir()
    vllm.write(folder / "public", eagle.build(), eagle)
    return folder


@pytest.fixture
def run(call, trained, tiny, inputs, tmp_path):
    """Runs a command whose arguments name inputs as ``@name``."""

    def start(line):
        names = {"@ckpt": trained.ckpt, "@tiny": tiny, "@out": tmp_path / "out", "@drafter": trained.folder}
        words = [str(names.get(word, word)).replace("@@", f"{tmp_path}/") for word in line.split()]
        words = [word.replace("@", f"{inputs}/") for word in words]
        return call(commands.main, *words, *(QUICK if words[0] in ("eval",) else ()), *ONCE.get(words[0], ()))

    return start


# Commands, and after how many bytes of a file the disk is full; some files of each are smaller.
COMMANDS = {
    "eval --base @tiny --drafter anpd --out @out": 2000,
    "report --answers @answers.jsonl --baseline @answers.jsonl --out @out": 300,
    "replay --tokenizer @tiny --answers @answers.jsonl --questions @questions.jsonl --out @out --drafter anpd": 300,
    "regenerate --base @tiny --files embedded:4 --limit 2 --max-new-tokens 8 --out @out": 300,
    "export @ckpt @out": 4000,
    "import @public @out --base @tiny": 4000,
    "index corpus @out --tokenizer @tiny --files @text.txt --min-count 2": 64,
    "index datastore @out --tokenizer @tiny --files @text.txt": 64,
}
NEW = {
    "tokenizer @out --count 20 --vocab-size 300": 3000,
    "features --base @tiny --files embedded:4 --max-length 160 --out @out": 3000,
}


@pytest.mark.slow
@pytest.mark.parametrize("line", COMMANDS)
def test_the_old_output_is_kept(line, run, tmp_path):
    outcome = run(line)
    assert outcome.code == 0, outcome.err
    before = contents(tmp_path)
    with full_disk(COMMANDS[line]):
        outcome = run(f"{line} --overwrite")
    error = outcome.err.splitlines()[-1]  # `eval` may have said before that the machine is busy
    assert outcome.code == 2 and error.startswith("drafters: error: ") and "Traceback" not in outcome.err
    assert "could not be written (File too large), and what was there before is kept" in error
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_the_old_page_of_several_evaluations_is_kept(run, tmp_path):
    for name in ("one", "two"):
        assert run(f"eval --base @tiny --out @@{name}").code == 0
    assert run("report @@one @@two --out @out").code == 0
    before = contents(tmp_path)
    with full_disk(2000):
        outcome = run("report @@two @@one --out @out --overwrite")
    assert outcome.code == 2 and "what was there before is kept" in outcome.one_line_error("drafters")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("line", NEW)
def test_nothing_is_left_of_a_new_output(line, run, tmp_path):
    with full_disk(NEW[line]):
        error = run(line).one_line_error("drafters")
    assert "File too large" in error
    assert not contents(tmp_path)


def test_every_command_with_an_output_is_tested():
    tested = {line.split()[0] for line in (*COMMANDS, *NEW)}
    assert tested == commands.COMMANDS.keys() - {
        "chat",
        "tune",  # a database: tests/inference/test_tune.py
        "verify",
        "doctor",
        "show-mask",
        "serve",
        "serve-command",
        "push",
    }


@pytest.mark.slow
def test_the_checkpoints_of_a_training_are_kept(call, write_recipe, tmp_path):
    config = write_recipe(tmp_path, max_steps=2, val_check_interval=1, limit_val_batches=0)
    assert call(lightning_command.main, "fit", "--config", config).code == 0
    before = contents(tmp_path / "checkpoints")
    with full_disk(4000):
        outcome = call(
            lightning_command.main, "fit", "--config", config, "--ckpt_path", "last", "--trainer.max_steps", 4
        )
    assert "File too large" in outcome.err.splitlines()[-1] and "Traceback" not in outcome.err
    assert contents(tmp_path / "checkpoints") == before
