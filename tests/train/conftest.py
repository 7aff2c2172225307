"""A tiny random base as a folder, a tiny recipe, and a drafter that was trained and exported with them."""

import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from tqdm import tqdm

from benchmarks.pretrain import train_tokenizer
from data.conversations import load_conversations
from inference.verifier.base import load_base
from train.cli import run_drafters, run_lightning

ROOT = Path(__file__).parents[2]
QUIET = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
QUIET |= {"enable_model_summary": False}  # arguments of a trainer


@pytest.fixture(scope="session", autouse=True)
def surroundings(tmp_path_factory):
    """Tokenised data is cached in a folder of this run, and commands compute in one thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("DRAFTERS_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("DRAFTERS_DEBUG", raising=False)
        torch.set_num_threads(1)
        yield


@pytest.fixture(autouse=True)
def own_process(monkeypatch):
    """Commands run here as in a process of their own: they rewrite sys.argv, and Lightning's log handler keeps the
    standard error of the first test that imported it, which is closed by the next."""
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(logging, "raiseExceptions", False)


@pytest.fixture(scope="session")
def tiny_tokenizer():
    return train_tokenizer(load_conversations(["embedded:100"])[0], vocab_size=400)


def save_llama(folder, tokenizer, hidden_size=32, vocab_size=None, num_layers=2, seed=2, dtype=torch.float32, **others):
    """Save a random LLaMA whose next token depends mostly on the last one, so that a drafter can learn it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size or len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
        initializer_range=0.15,
        **{"intermediate_size": 64} | others,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=1.0)
        torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_tiny(tiny_tokenizer, tmp_path_factory):
    """Saves another tiny base: of another size, or with another tokenizer."""

    def make(name, tokenizer=None, **changes):
        return save_llama(tmp_path_factory.mktemp(name), tokenizer or tiny_tokenizer, **changes)

    return make


@pytest.fixture(scope="session")
def tiny(shared_folder, tiny_tokenizer):
    """Folder of the tiny base."""
    return shared_folder("tiny-base", lambda folder: save_llama(folder, tiny_tokenizer))


@pytest.fixture(scope="session")
def tiny_base(tiny):
    """The tiny base in float32. A test that changes it restores it."""
    return load_base(str(tiny))


@pytest.fixture(scope="session")
def write_recipe(tiny):
    """Writes the tiny training for runs under a folder, with changes, and returns the YAML's path.

    It is some steps of a CTC drafter on embedded conversations, and ends with a checkpoint ``last``.
    """
    groups = {"trunk": {"num_frames": 6}, "loss": {"num_labels": 4, "num_anchors": 16}}
    drafter = {"class_path": "drafters.CTC", "init_args": groups | {"draft": {"num_nodes": 8, "top_k": 4}}}

    def write(folder, model=None, max_steps=8, **trainer):
        folder.mkdir(exist_ok=True)
        saved = {"dirpath": str(folder / "checkpoints"), "every_n_train_steps": min(4, max_steps), "save_last": True}
        callback = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": saved}
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        values = {
            "seed_everything": 0,
            "model": {"base": str(tiny), "learning_rate": 0.01, "max_val_tokens": 16, "drafter": drafter},
            "data": {"files": ["embedded:24"], "val_size": 4, "max_length": 160, "batch_size": 4},
            "trainer": {
                "accelerator": "cpu",
                "devices": 1,
                "max_steps": max_steps,
                "val_check_interval": min(4, max_steps),
                "check_val_every_n_epoch": None,
                "default_root_dir": str(folder),
                "callbacks": [callback],
            },
        }
        values["model"] |= model or {}
        values["trainer"] |= quiet | trainer
        path = folder / "tiny.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        return path

    return write


@dataclass(frozen=True)
class Trained:
    """A finished training."""

    config: Path  # its YAML
    ckpt: Path  # its last checkpoint
    folder: Path  # the drafter exported from it


@pytest.fixture(scope="session")
def trained(write_recipe, shared_folder):
    """The tiny recipe, trained by `lightning fit` and exported by `drafters export`, both in process."""

    def train(runs):
        config = write_recipe(runs)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["pytest"])
            run_lightning(["fit", "--config", str(config)])
            run_drafters(["export", str(runs / "checkpoints" / "last.ckpt"), str(runs / "drafter")])

    runs = shared_folder("trained", train)
    return Trained(runs / "tiny.yaml", runs / "checkpoints" / "last.ckpt", runs / "drafter")


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    def succeeded(self):
        """The same outcome, after checking that the command did what it was asked for."""
        assert self.code == 0, self.err
        return self

    def one_line_error(self, command):
        """The message, after checking that the command ended as a mistake of the user should.

        Lightning's own messages on standard error may come before it.
        """
        assert self.code == 2, f"exit code {self.code}: {self.out}{self.err}"
        assert "Traceback" not in self.out + self.err
        (line,) = (line for line in self.err.splitlines() if "error: " in line)
        assert re.match(rf"({command})( [a-z-]+)?: error: ", line), self.err
        return line


@pytest.fixture
def call(capsys):
    """Runs a command in process: ``call(train.cli.run_lightning, "fit", ...)``."""

    def run(main, *args):
        capsys.readouterr()
        code = 0
        try:
            main([str(arg) for arg in args])
        except SystemExit as exit:
            code = exit.code or 0
        return Outcome(code, *capsys.readouterr())

    return run


class Losses(L.Callback):
    """Writes the loss of each batch, bit for bit, to a file that survives any end of the process."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        name = f"{trainer.global_rank}.{trainer.current_epoch}.{batch_idx}"
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{name} {float(outputs['loss']).hex()}\n")


def read_losses(folder):
    """Return all losses that were recorded for each rank, epoch and batch."""
    losses = {}
    for line in (folder / "losses.txt").read_text(encoding="utf-8").splitlines():
        batch, loss = line.split()
        losses.setdefault(batch, set()).add(loss)
    return losses


@pytest.fixture(scope="session")
def write_run(write_recipe):
    """Writes a recipe of everything that a resumed run could get wrong; returns the YAML's path.

    Anchors are sampled, gradients are accumulated over two of the five batches of an epoch (so the last stands alone),
    validation comes at batches of its own, and two kinds of checkpoint are kept.
    """
    kind = "lightning.pytorch.callbacks.ModelCheckpoint"
    best = {"filename": "best", "monitor": "val/acceptance_length", "mode": "max"}
    last = {"filename": "step={step}", "auto_insert_metric_name": False, "save_last": "link"}
    last["save_on_exception"] = True

    groups = {"trunk": {"num_frames": 6}, "draft": {"num_nodes": 8, "top_k": 4}}
    groups["loss"] = {"num_labels": 4, "num_anchors": 16}
    model = {"warmup_steps": 5, "schedule": "cosine", "drafter": {"class_path": "drafters.CTC", "init_args": groups}}

    def write(folder, every=4, keep=1, **trainer):
        callbacks = [
            {"class_path": f"{__name__}.Losses", "init_args": {"path": str(folder / "losses.txt")}},
            {"class_path": kind, "init_args": best},
            {"class_path": kind, "init_args": last | {"every_n_train_steps": every, "save_top_k": keep}},
        ]
        settings = {"max_steps": 30, "accumulate_grad_batches": 2, "val_check_interval": 7, "callbacks": callbacks}
        return write_recipe(folder, model, **settings | trainer)

    return write


@dataclass(frozen=True)
class Forked:
    """A command in a copy of this process, which has imported everything already."""

    process: int  # its id
    log: Path  # what it prints

    def wait(self):
        """Its exit code, as subprocess has it: minus the number of the signal that killed it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])

    def succeed(self):
        assert self.wait() == 0, self.log.read_text()

    def send(self, number):
        os.kill(self.process, number)

    def is_alive(self):
        return os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _with_subclasses(kind):
    return [kind, *(deeper for subclass in kind.__subclasses__() for deeper in _with_subclasses(subclass))]


@pytest.fixture(scope="session")
def fork(tmp_path_factory):
    """Starts a command in a forked process at the repository's root, `lightning` unless ``main`` is another.

    The copy has imported everything already, which a fresh process takes seconds for. ``before`` is called in it first.
    """

    def start(
        *args: object, main: Callable[[list[str]], None] = run_lightning, before: Callable[[], None] = bool
    ) -> Forked:
        log = tmp_path_factory.mktemp("forked") / "log.txt"
        if process := os.fork():
            return Forked(process, log)
        code = 70
        try:
            sys.stdout = sys.stderr = open(log, "w", buffering=1, encoding="utf-8")  # noqa: SIM115
            os.dup2(sys.stdout.fileno(), 1)
            os.dup2(sys.stdout.fileno(), 2)
            os.chdir(ROOT)
            # tqdm's own lock is shared with this process, and stays locked for ever if a copy is killed inside it.
            for bar in _with_subclasses(tqdm):
                bar.set_lock(threading.RLock())
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore Ctrl-C
            before()
            main([str(arg) for arg in args])
            code = 0
        except SystemExit as stopped:
            code = stopped.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    return start
