"""Files and options from a stranger end in one line: no traceback, nothing endless, no memory for what is refused."""

import gzip
import json
import os
import shutil
import signal
from contextlib import contextmanager

import pytest
import torch

from train.cli import commands, lightning_command


@contextmanager
def seconds(limit):
    """Fail instead of waiting for ever."""

    def stop(*_):
        raise AssertionError(f"still running after {limit} seconds")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


@pytest.fixture(scope="module")
def place(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "tiny").symlink_to(tiny)
    config = json.loads((tiny / "config.json").read_text())
    for name, change in {
        "base-of-many-layers": {"num_hidden_layers": 10**8},
        "base-of-wide-layers": {"hidden_size": 10**7, "intermediate_size": 10**7},
    }.items():
        shutil.copytree(tiny, folder / name)
        (folder / name / "config.json").write_text(json.dumps(config | change))
    (folder / "empty.ckpt").touch()
    arguments = {"drafter": {"class_path": "drafters.CTC", "init_args": {"trunk": {"num_layers": 10**8}}}}
    shape = dict.fromkeys(["hidden_size", "vocab_size", "num_layers", "num_heads", "head_dim", "intermediate_size"], 8)
    base = {"shape": shape, "name": "tiny", "tokenizer_hash": "0"}
    rest = {"learning_rate": 1.0, "val_answers": "greedy"}
    for name, saved in {
        "no-base": {"hyper_parameters": arguments | rest, "state_dict": {}, "global_step": 1},
        "no-weights": {"hyper_parameters": arguments | rest, "base": base, "global_step": 1},
        "many-layers": {"hyper_parameters": arguments | rest, "base": base, "state_dict": {}, "global_step": 1},
        "odd-arguments": {"hyper_parameters": 5},
        "base-of-many-layers": {
            "hyper_parameters": {"context_length": 9, "num_layers": 10**8, "tokenizer": str(tiny)},
            "state_dict": {},
        },
    }.items():
        torch.save(saved, folder / f"{name}.ckpt")
    (folder / "text.txt").write_text("a text of a few words\n" * 5)
    (folder / "broken.txt.gz").write_bytes(gzip.compress(os.urandom(5000).hex().encode() * 9)[:2000])
    (folder / "file").touch()
    return folder


TEXT = "datastore @store --tokenizer @tiny --files "
DRAFTERS = {
    # ---- bases
    "verify --drafter anpd --base @base-of-many-layers": "asks for 100,000,000 layers",
    "verify --drafter anpd --base @base-of-wide-layers": "parameters, but the weights are",
    # ---- checkpoints
    "export @empty.ckpt @out": "is not a readable checkpoint",
    "export @no-base.ckpt @out": "holds no complete drafter (KeyError: 'base'",
    "export @no-weights.ckpt @out": "holds no complete drafter (KeyError: 'state_dict'",
    "export @many-layers.ckpt @out": "num_layers must be at most 1000, not 100000000",
    "export @base-of-many-layers.ckpt @out": "num_layers is 100000000",
    "export @odd-arguments.ckpt @out": "holds neither a drafter nor a base",
    # ---- data
    TEXT + "@broken.txt.gz": "Compressed file ended",
    # ---- options
    "tokenizer @file": "file",
    "tokenizer --out= --count 5": "--out has an empty name",
    "tokenizer @t --vocab-size 1000000000": "vocab_size 1000000000",
    "eval --base @tiny --benchmark embedded --drafter anpd --out=": "--out has an empty name",
    "eval --base @tiny --benchmark embedded --drafter anpd --out @" + "x" * 300: "File name too long",
    TEXT + "@text.txt --depth 1000000000": "depth must be at most 4096",
    "sweep --base @tiny --benchmark embedded --drafter anpd --grid order=2..1000000000 --out @out": "than 1000 values",
}
FIT = "fit --config quickstart.yaml --model.base @tiny --trainer.default_root_dir @run "
LIGHTNING = {
    FIT + "--trainer.val_check_interval 0": "val_check_interval must be above 0",
    FIT + "--trainer.accumulate_grad_batches 0": "accumulate_grad_batches must be above 0",
    FIT + "--trainer.accelerator cpu --trainer.devices 99": "trainer.devices is 99",
    FIT + "--data.val_size -3": "val_size must be at least 0",
    FIT + "--model.drafter.init_args.num_layers 100000000": "num_layers must be at most",
    "fit --config base/tiny.yaml --trainer.default_root_dir @run --model.init_args.tokenizer @tiny "
    "--model.init_args.num_layers 100000000": "at most",
}


@pytest.mark.parametrize("row, said", DRAFTERS.items(), ids=[row[:60] for row in DRAFTERS])
def test_a_hostile_file_or_option_is_refused_in_one_line(call, place, row, said):
    before = sorted(place.rglob("*"))
    with seconds(120):
        outcome = call(commands.main, *(word.replace("@", f"{place}/") for word in row.split()))
    errors = [line for line in outcome.err.splitlines() if "error" in line]
    assert outcome.code == 2 and "Traceback" not in outcome.err, outcome.err
    assert len(errors) == 1 and said in errors[0], outcome.err
    assert sorted(place.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize("row, said", LIGHTNING.items(), ids=[row[:70] for row in LIGHTNING])
def test_a_hostile_config_or_value_is_refused_in_one_line(call, place, row, said):
    with seconds(120):
        outcome = call(lightning_command.main, *(word.replace("@", f"{place}/") for word in row.split()))
    errors = [line for line in outcome.err.splitlines() if "error" in line]
    assert outcome.code == 2 and "Traceback" not in outcome.err, outcome.err
    assert len(errors) == 1 and said in errors[0], outcome.err
