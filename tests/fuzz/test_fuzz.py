"""Damaged files and hostile options for the commands: each does its work, or ends in one line with exit code 2.

No input may lead to a traceback, take longer than `MAX_SECONDS`, or change a file that was there. In continuous
integration the same inputs are tried at every run. ``make fuzz`` goes on with new ones for FUZZ_MINUTES (30 by
default); FUZZ_SEED is the number of the first round, and a failure prints its own.
"""

import gzip
import io
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
MAX_SECONDS = 60
MINUTES = float(os.environ.get("FUZZ_MINUTES", 0))
NUM_EXAMPLES = 70

# Each line runs in a second or so. @ is a folder with the files that are named; out is not there yet. The first lines
# write what later ones read.
PREPARE = [
    "eval --base @base --drafter anpd --benchmark embedded --limit 1 --max-new-tokens 3 --repeats 1 --out @results",
    "export @last.ckpt @drafter",
    "features --base @base --files @talk.json --out @store --template vicuna_v1.1 --max-length 64 --cache-dir @cache",
    "index corpus @corpus --tokenizer @base --files @text.txt --min-count 1",
    "index datastore @datastore --tokenizer @base --files @text.txt --depth 4",
]
FIT = (
    "--data.val_size 1 --trainer.max_steps 1 --trainer.default_root_dir @out --data.template vicuna_v1.1 --print_config"
)
LINES = [
    *(line.replace("@results", "@out").replace("@drafter", "@out").replace("@store", "@out") for line in PREPARE[:3]),
    *(line.replace("@corpus", "@out").replace("@datastore", "@out") for line in PREPARE[3:]),
    "eval --base @base --drafter ctc=@drafter --benchmark embedded --limit 1 --max-new-tokens 3 --repeats 1 --out @out",
    "verify --base @base --drafter corpus=@corpus --benchmark mt_bench=@questions.jsonl --max-new-tokens 3",
    "verify --base @base --drafter rest=@datastore --benchmark file=@questions.parquet --max-new-tokens 3",
    "report @results --out @out",
    "regenerate --base @base --files @talk.jsonl.gz --limit 1 --max-new-tokens 3 --template vicuna_v1.1 --out @out",
    "show-mask --tokenizer @base --files @talk.parquet --template vicuna_v1.1",
    "import @drafter @out --base @base",
    f"fit --config quickstart.yaml --config @overlay.yaml --model.base @base --data.files [@talk.json] {FIT}",
    f"fit --config quickstart.yaml --model.base @base --data.files [@talk.json] --data.features @store {FIT}",
]
OPTIONS = ["limit", "max_new_tokens", "template", "benchmark", "drafter", "base", "dtype", "device"]
OPTIONS += ["files", "repeats", "min_count", "depth", "max_length", "temperature", "num_nodes", "data.batch_size"]
OPTIONS += ["data.val_size", "data.max_tokens", "trainer.max_epochs", "trainer.precision", "model.learning_rate"]
OPTIONS += ["model.drafter", "config", "ckpt_path"]
WORDS = ["@base", "@results", "@nothing", "@text.txt", "@talk.json", "@last.ckpt", "hub:x", "embedded:-1", "none", ""]
WORDS += ["-1", "0", "1e308", "nan", "0x10", "１", "null", "[[[[", "a: &a [*a]", "!!python/object:os.system x", "{0}"]
WORDS += ["anpd:order=99999999999", "ctc=@results", "draft_model=@base:num_draft=-1", "joint:min_probability=nan"]
WORDS += ["1..3", "corpus=@text.txt", "self_speculative=@talk.json", "\x1b[31m", "\x00", "\ud800", "\u202e", "x" * 300]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
damages = st.one_of(
    st.tuples(st.just("cut"), st.floats(0, 1), st.just(b"")),
    st.tuples(st.just("bytes"), st.floats(0, 1), st.binary(min_size=1, max_size=9)),
    st.tuples(st.just("value"), st.floats(0, 1), json_values),
    st.tuples(st.just("value"), st.floats(0, 0.05), json_values),  # near the beginning, where the structure is
)
changes = st.lists(st.tuples(st.sampled_from(OPTIONS), st.sampled_from(WORDS)), min_size=1, max_size=2)


def damaged(name, data, damage):
    """The content of a file, cut off, or with some bytes or a value of its JSON replaced."""
    kind, place, new = damage
    at = int(place * (len(data) - 1))
    if kind != "value":
        return data[:at] if kind == "cut" else data[:at] + new + data[at + len(new) :]
    try:
        text = gzip.decompress(data) if name.endswith(".gz") else data
        lines = [json.loads(line) for line in text.splitlines()] if ".jsonl" in name else [json.loads(text)]
    except ValueError:
        return data[:at] + repr(new).encode("utf-8", "replace") + data[at:]
    places = [(lines, key) for key in range(len(lines))]
    for container, key in places:  # which grows
        inner = container[key]
        keys = inner if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else ()
        places += [(inner, key) for key in keys]
    container, key = places[int(place * (len(places) - 1))]
    container[key] = new
    changed = "\n".join(map(json.dumps, lines)).encode()
    return gzip.compress(changed) if name.endswith(".gz") else changed


def run(line, folder):
    """Run a command in this process; return its exit code and what it prints on standard error."""
    words = [word.replace("@", f"{folder}/") for word in (line.split() if isinstance(line, str) else line)]
    script = "lightning" if words[0] == "fit" else "drafters"
    module, name = re.search(rf'^{script} = "(.+):(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE).groups()

    def stop(*_):
        raise AssertionError(f"still running after {MAX_SECONDS} seconds")

    out, err, code = io.StringIO(), io.StringIO(), 0
    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(MAX_SECONDS)
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script])
        patch.setattr(sys, "stdin", io.StringIO())  # which "-" reads
        try:
            getattr(import_module(module), name)(words)
        except SystemExit as ended:
            code = ended.code or 0
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, previous)
    return code, err.getvalue()


def write_files(folder):
    """Write what the commands read: a base, conversations, texts, questions and a checkpoint."""
    import pyarrow
    import torch
    from pyarrow import parquet
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "checkpoints" / "tiny-chat")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, eos_token_id=2, **sizes)
        LlamaForCausalLM(config).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    talk = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello there"}]
    rows = [{"id": f"n{n}", "conversations": talk} for n in range(3)]
    (folder / "talk.json").write_text(json.dumps(rows))
    (folder / "talk.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "talk.parquet")
    (folder / "text.txt").write_text("one two three four five six seven\n\neight nine\n" * 5)
    question = {"question_id": 1, "category": "x", "turns": ["Who is it?"]}
    (folder / "questions.jsonl").write_text(json.dumps(question))
    parquet.write_table(pyarrow.Table.from_pylist([question]), folder / "questions.parquet")
    (folder / "overlay.yaml").write_text("trainer: {max_epochs: 1}\ndata:\n  batch_size: 2\n")
    (folder / "nothing").touch()
    write_checkpoint(folder / "last.ckpt", len(tokenizer))


def write_checkpoint(path, vocab_size):
    import torch

    from drafters import CTC, recipe
    from drafters.protocol import BaseShape

    shape = BaseShape(16, vocab_size, 2, 2, 8, 24)
    arguments = {"trunk": {"num_frames": 4, "num_layers": 1}, "loss": {"num_labels": 3}}
    weights = recipe.build(CTC, shape, arguments).state_dict()
    saved = {
        "hyper_parameters": {
            "drafter": {"class_path": "drafters.CTC", "init_args": arguments},
            "learning_rate": 0.1,
            "val_answers": "greedy",
        },
        "base": {"shape": vars(shape), "name": "toy", "tokenizer_hash": "0" * 16},
        "state_dict": {f"drafter.{name}": weight for name, weight in weights.items()},
        "global_step": 3,
    }
    torch.save(saved, path)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder of valid files; everything that commands and libraries write elsewhere by default goes beside it."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HOME", "TMPDIR", "DRAFTERS_CACHE", "MPLCONFIGDIR"):
            patch.setenv(name, str(home))
        patch.setattr(tempfile, "tempdir", str(home))
        patch.chdir(home)
        folder = home / "whole"
        folder.mkdir()
        write_files(folder)
        for line in PREPARE:
            code, said = run(line, folder)
            assert code == 0, (line, said)
        yield folder


def state(folder):
    """Every file with its size and the time of its last change."""
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def fuzz(strategy, check):
    """Check inputs of a strategy: always the same, or new ones for a share of FUZZ_MINUTES."""
    deadline, seed = time.monotonic() + 30 * MINUTES, int(os.environ.get("FUZZ_SEED", 0))
    phases = [hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if MINUTES else [])]
    quiet = {"deadline": None, "database": None, "suppress_health_check": list(hypothesis.HealthCheck)}
    while True:
        options = hypothesis.settings(max_examples=NUM_EXAMPLES, phases=phases, **quiet)
        print(f"FUZZ_SEED={seed}")
        hypothesis.seed(seed)(options(hypothesis.given(strategy)(check)))()
        seed += 1
        if time.monotonic() > deadline:
            return


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", ["files", "options"])
def test_a_command_does_its_work_or_ends_in_one_line(place, what):
    # The files of a base are for transformers, whose errors have many types.
    files = sorted(path for path in state(place) if path.relative_to(place).parts[0] not in ("cache", "base"))

    def check(example):
        line, file, change = example
        words = line.split()
        folder = place.with_name("changed")
        shutil.copytree(place, folder)
        try:
            if what == "files":
                damaged_file = folder / file.relative_to(place)
                damaged_file.write_bytes(damaged(file.name, file.read_bytes(), change))
            else:
                words += [f"--{name.replace('_', '-')}={value}" for name, value in change]
            before = state(folder)
            code, said = run(words, folder)
            assert code in (0, 1, 2) and "Traceback" not in said, (words, code, said[-3000:])
            errors = re.findall(r"^(?:drafters|lightning)(?: [a-z-]+)?: error: ", said, re.MULTILINE)
            assert len(errors) == (code == 2), (words, said[-2000:])
            now = state(folder)
            assert {path: now.get(path) for path in before} == before, words
        finally:
            shutil.rmtree(folder)

    def of_line(line):
        named = [word for word in re.findall(r"@([\w.]+)", line)]
        own = [file for file in files if file.relative_to(place).parts[0] in named]
        return st.tuples(st.just(line), st.sampled_from(own or files), damages if what == "files" else changes)

    fuzz(st.sampled_from(LINES).flatmap(of_line), check)
