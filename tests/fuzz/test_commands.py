"""Hostile command lines: every command does its work, or ends in one line with exit code 2."""

import io
import json
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from inspect import signature
from typing import get_args, get_type_hints

import pytest
from hypothesis import strategies as st

from tests.fuzz.conftest import bounded, files_below
from train.cli import commands, lightning_command

# Each line runs in a second or so. @ is a folder with the files that are named, and out is not there yet.
VALID = {
    "eval": "--base @base --drafter anpd --benchmark embedded --limit 1 --max-new-tokens 3 --repeats 1",
    "tune": "--base @base --drafter anpd --space order=2 --sampler grid --limit 1 --max-new-tokens 3 --out @out",
    "report": "@results",
    "replay": "--tokenizer @base --drafter anpd --answers @answers.jsonl --questions @questions.jsonl",
    "verify": "--base @base --drafter anpd --benchmark embedded=@questions.jsonl --max-new-tokens 3",
    "regenerate": "--base @base --files @talk.json --limit 1 --max-new-tokens 3 --template vicuna_v1.1 --out @out",
    "export": "@last.ckpt @out",
    "import": "@public @out --base @base",
    "doctor": "@last.ckpt @results",
    "show-mask": "--tokenizer @base --files @talk.json --template vicuna_v1.1",
    "features": "--base @base --files @talk.json --out @out --template vicuna_v1.1 --max-length 64 --cache-dir @cache",
    "tokenizer": "@out --files @talk.json --vocab-size 300",
    "index": "corpus @out --tokenizer @base --files @text.txt --min-count 1",
}
# Large values of these ask for much work, and get it.
WORK = {
    "limit",
    "texts",
    "count",
    "repeats",
    "num_texts",
    "num_roots",
    "trials",
    "max_new_tokens",
    "threads",
    "concurrency",
}
NUMBERS = ["0", "-1", "1", "3", "1e3", "0.5", "-0.5", "nan", "inf", "-inf", "", "x", "0x10", "１"]
LARGE = ["65537", "1000000000", "9223372036854775808", "1e308"]
TEXTS = [
    *(
        "",
        " ",
        "x",
        "-",
        "--",
        "\x1b[31m",
        "\x00",
        "\ud800",
        "\u202e",
        "é" * 200,
        "x" * 300,
        "x" * 5000,
    ),
    *(
        "~",
        "null",
        "[]",
        "{}",
        "[[[[",
        "a: &a [*a]",
        "!!python/object:os.system x",
        "*",
        "%s",
        "{0}",
    ),
    *(
        "@base",
        "@results",
        "@pipe",
        "@empty",
        "@nothing",
        "@text.txt",
        "@talk.json",
        "@last.ckpt",
        "hub:x",
        "embedded:-1",
    ),
    *(
        "embedded:99999999999999999999",
        "anpd:order=99999999999",
        "ctc=@results",
        "ctc:",
        "draft_model=@base:num_draft=-1",
    ),
    *(
        "self_speculative=@talk.json",
        "corpus=@text.txt",
        "rest=@pipe",
        "none",
        "joint:min_probability=nan",
        "1..3",
        "a=1..9",
    ),
]


def option_hints(command):
    """The options of a command, with their types, as its own parser has them."""
    entry = commands.COMMANDS[command]
    function = getattr(import_module(entry.module), entry.function)
    groups = commands.option_groups(function)
    hints = {name: hint for name, hint in get_type_hints(function).items() if name in signature(function).parameters}
    for name, group in groups.items():
        del hints[name]
        hints |= {field: hint for field, hint in get_type_hints(group).items() if field in signature(group).parameters}
    return hints


def values(name, hint):
    """Values for an option: mostly of its type, sometimes of another."""
    if hint is bool:
        return st.sampled_from(["true", "false", "", "maybe", "1"])
    if any(kind in (int, float) for kind in (hint, *get_args(hint))):
        return st.sampled_from([number for number in NUMBERS if number] if name in WORK else NUMBERS + LARGE)
    choices = [choice for choice in get_args(hint) if isinstance(choice, str)]
    return st.sampled_from([*TEXTS, *choices * 3])


@st.composite
def command_lines(draw):
    command = draw(st.sampled_from(sorted(VALID)))
    hints = option_hints(command)
    hints.pop("endpoint", None)  # a server that does not answer is waited for
    chosen = draw(st.lists(st.sampled_from(sorted(hints)), min_size=1, max_size=3, unique=True))
    changes = {name: draw(values(name, hints[name])) for name in chosen}
    is_removed = draw(st.integers(0, 9)) == 0
    words = VALID[command].split()
    for name, value in changes.items():
        flag = f"--{name.replace('_', '-')}"
        while flag in words:  # the value of the valid line is replaced
            at = words.index(flag)
            del words[at : at + 2]
        if not is_removed or name in WORK:
            words.append(f"{flag}={value}")
    return [command, *words]


@pytest.fixture(autouse=True)
def at_home(tmp_path, monkeypatch):
    """What commands and libraries write elsewhere by default goes below the folder of the test."""
    for name in ("HOME", "TMPDIR", "DRAFTERS_CACHE", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(scope="module")
def place(tiny, tmp_path_factory):
    """A folder of valid files, and of things that are no files."""
    import os

    from tests.fuzz import test_readers as readers

    folder = tmp_path_factory.mktemp("place")
    (folder / "base").symlink_to(tiny)
    for name in ("results", "journals", "public"):
        (folder / name).mkdir()
    readers.write_texts(folder, tiny)
    readers.write_results(folder / "results", tiny)
    readers.write_checkpoints(folder, tiny)
    readers.write_public(folder / "public", tiny)
    (folder / "empty").touch()
    os.mkfifo(folder / "pipe")
    question = {"question_id": 1, "category": "x", "turns": ["Who is it?"]}
    (folder / "questions.jsonl").write_text(json.dumps(question))
    answer = {"question_id": 1, "choices": [{"turns": ["It is she."], "new_tokens": [5], "idxs": [4]}]}
    (folder / "answers.jsonl").write_text(json.dumps(answer))
    return folder


def ended(main, words, folder, codes, allowed):
    """Run a command that can write below the ``allowed`` folders only; check its exit code and what it prints."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with bounded(allowed), redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO())  # which "-" reads
        try:
            main([word.replace("@", f"{folder}/") for word in words])
        except SystemExit as exit:
            code = exit.code or 0
    said = err.getvalue()
    assert code in codes, (words, code, said[-2000:])
    assert "Traceback" not in said, (words, said[-3000:])
    if code == 2:
        assert sum(line.startswith(("drafters: error: ", "lightning: error: ")) for line in said.splitlines()) == 1, (
            said
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_hostile_command_line_ends_in_one_line(fuzz, place, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["drafters"])

    def check(words):
        import shutil

        there = files_below(place)
        here = tmp_path / "here"
        here.mkdir()
        monkeypatch.chdir(here)
        try:
            ended(commands.main, words, place, (0, 1, 2), [place, tmp_path])
        finally:
            monkeypatch.chdir(tmp_path)
            shutil.rmtree(here)
        now = files_below(place)
        assert {path: now.get(path) for path in there if "--overwrite" not in " ".join(words)} == {
            path: there[path] for path in there if "--overwrite" not in " ".join(words)
        }, words
        for path in now.keys() - there.keys():
            path.unlink()

    fuzz(command_lines(), check, 60)


TRAINER = ["max_steps", "max_epochs", "val_check_interval", "accumulate_grad_batches", "limit_val_batches", "devices"]
TRAINER += ["gradient_clip_val", "log_every_n_steps", "precision", "accelerator", "strategy", "num_nodes"]
DATA = ["val_size", "batch_size", "max_length", "limit", "seed", "files", "template", "max_tokens", "cache_dir"]
MODEL = ["learning_rate", "warmup_steps", "base_dtype", "val_answers", "max_val_tokens", "drafter", "base"]
KEYS = [f"trainer.{key}" for key in TRAINER] + [f"data.{key}" for key in DATA] + [f"model.{key}" for key in MODEL]
KEYS += ["ckpt_path", "seed_everything", "config", "model.drafter.init_args.num_frames", "resume", "faults.patience"]
FIT = (
    "fit --config quickstart.yaml --model.base @base --data.files [@talk.json] --data.val_size 1 --trainer.max_steps 1"
)
FIT += " --model.drafter.init_args.num_frames 3 --trainer.default_root_dir @out --data.template vicuna_v1.1"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_hostile_training_command_is_refused_in_one_line(fuzz, place, tmp_path, monkeypatch):
    """Each line holds one key that does not exist, so that none trains; what comes before that is checked."""
    monkeypatch.setattr(sys, "argv", ["lightning"])
    monkeypatch.chdir(tmp_path)
    changes = st.lists(
        st.tuples(st.sampled_from(KEYS), st.sampled_from(NUMBERS + LARGE + TEXTS)), min_size=1, max_size=2
    )

    def check(chosen):
        words = [*FIT.split(), *(f"--{key}={value}" for key, value in chosen), "--print_config"]
        ended(lightning_command.main, words, place, (0, 2), [place, tmp_path])

    fuzz(changes, check, 15)
