"""The shipped base in llama.cpp's server, with drafters that were trained here and exported.

These tests need llama.cpp, whose source the variable LLAMA_CPP_SOURCE names: `make test-llamacpp`.
"""

import json
import os
import shlex
import subprocess
import sys
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from data import benchmarks
from data.conversations import user_message
from data.tokenizer import tokenizer_hash
from drafters import checkpoint, recipe, registry
from inference import drafter_specs
from inference.evaluate import results
from inference.llama_cpp import server_line
from inference.openai_server import OpenAIServer
from inference.prompts import encode_messages
from inference.server_process import free_port, running_server
from inference.verifier.base import load_base
from inference.verifier.runner import Runner
from inference.verifier.session import Session
from tests.inference.conftest import train_briefly
from train.cli import run_drafters
from train.formats.block import without_blank

SOURCE = Path(os.environ["LLAMA_CPP_SOURCE"])
BASE, EOS, MASK = "checkpoints/tiny-chat", 2, 0
NUM_PROMPTS, NUM_TOKENS = 8, 48
TRUNK = {"num_frames": 5, "hidden_layers": [2, 5, 7]}
BLOCK = {"loss": {"num_anchors": 16}, "draft": {"tree": "chain"}}
RECIPES = {
    "dspark": ("drafters.Block", {"trunk": TRUNK | {"markov_rank": 16}, **BLOCK}),
    "dflash": ("drafters.Block", {"trunk": TRUNK | {"sample_from_anchor": False}, **BLOCK}),
    "ctc": (
        "drafters.CTC",
        {
            "trunk": TRUNK | {"markov_rank": 16, "frames_differ": False, "root_everywhere": False},
            "loss": {"num_labels": 5, "num_anchors": 16},
        },
    ),
    "eagle3": (
        "drafters.EAGLE3",
        {
            "hidden_layers": [2, 4, 6],
            "own_head": True,
            "draft_vocab_size": 900,
            "loss": {"num_unroll": 2},
            "draft": {"tree": "chain", "depth": 4},
        },
    ),
}


@pytest.fixture(scope="module")
def base():
    return load_base(BASE)


@pytest.fixture(scope="module")
def questions():
    asked = benchmarks.load_questions("embedded")[:NUM_PROMPTS]
    return [replace(question, turns=question.turns[:1]) for question in asked]


@pytest.fixture(scope="module")
def prompts(base, questions):
    return [encode_messages(base, [user_message(question.turns[0])], "tokenizer") for question in questions]


@pytest.fixture(scope="module")
def base_file(tmp_path_factory):
    """The base as llama.cpp's converter writes it; that knows tokenizers by a hash, and does not know this one."""
    path = tmp_path_factory.mktemp("base") / "base.gguf"
    script = f"""import runpy, sys
sys.path[:0] = [{str(SOURCE)!r}, {str(SOURCE / "gguf-py")!r}]
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "default"
runpy.run_path({str(SOURCE / "convert_hf_to_gguf.py")!r}, run_name="__main__")"""
    subprocess.run([sys.executable, "-c", script, BASE, "--outtype", "f32", "--outfile", path], check=True)
    return path


@pytest.fixture(scope="module")
def drafters(base, prompts, tmp_path_factory):
    """Each drafter after a short training on what the base writes, in the project's format."""
    alone = Session(Runner(base), drafter_specs.make("none", Runner(base)))
    texts = [prompt + alone.run(prompt, NUM_TOKENS, {EOS}).tokens for prompt in prompts]
    ids = torch.tensor([text + [EOS] * (max(map(len, texts)) - len(text)) for text in texts])
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        mask[row, len(prompt) - 1 : len(text)] = True
    folders = {}
    for name, (class_path, init_args) in RECIPES.items():
        torch.manual_seed(0)
        drafter = recipe.build(registry.find_class(class_path), base.shape, init_args)
        train_briefly(drafter, base, ids, 35 if name == "eagle3" else 70, 4e-3, mask)
        folders[name] = tmp_path_factory.mktemp(name)
        vocabulary = tokenizer_hash(base.tokenizer)
        config = checkpoint.DrafterConfig(class_path, init_args, base.shape, BASE, vocabulary)
        checkpoint.save(folders[name], drafter, config)
    return folders


@pytest.fixture(scope="module")
def servers(base_file, base, drafters, questions, tmp_path_factory):
    """Addresses of llama.cpp's server alone and with each drafter, which the line of `serve-command` starts."""
    place, addresses = tmp_path_factory.mktemp("servers"), {}
    with ExitStack() as stack:
        for name in ["none", *RECIPES]:
            port = free_port()
            line = f"llama-server -m {base_file} --port {port}"
            if name != "none":
                export = ["export", drafters[name], place / name, "--format", "gguf", "--dtype", "float32"]
                export += ["--mask_token_id", MASK] if name != "eagle3" else []
                run_drafters([*map(str, export)])
                line = server_line(str(base_file), str(place / name), 4, port)
            words = [str(SOURCE / "build" / "bin" / "llama-server"), *shlex.split(line)[1:]]
            words += ["-t", "1", "-c", "1024", "-np", "2", "--host", "127.0.0.1"]
            addresses[name] = f"http://127.0.0.1:{port}"
            client = stack.enter_context(closing(OpenAIServer(addresses[name], uses_proxy=False)))
            is_ready = partial(client.get, "/health")
            stack.enter_context(running_server(name, words, place / f"{name}.log", is_ready))
        yield addresses


def test_texts_are_those_of_llama_cpp_alone_and_acceptance_is_that_of_our_own_chain(
    base, drafters, servers, prompts, questions, tmp_path
):
    rows = [{"question_id": question.question_id, "turns": list(question.turns)} for question in questions]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["eval", "--base", BASE, "--benchmark", f"file={tmp_path / 'questions.jsonl'}", "--concurrency", "1"]
    words += [word for name, address in servers.items() for word in ("--server", f"{name}={address}")]
    run_drafters([*words, "--max-new-tokens", str(NUM_TOKENS), "--out", str(tmp_path / "out")])
    by_name = {summary.drafter: summary for summary in results.read(tmp_path / "out").summaries["file"].values()}
    assert by_name.keys() == servers.keys()
    assert {summary.identical for summary in by_name.values()} == {NUM_PROMPTS}
    for name in RECIPES:
        drafter, config = checkpoint.load(drafters[name])
        if name == "ctc":
            drafter = without_blank(drafter, config)[0].eval()
        drafter.attach_base_weights(base.base_weights)
        session = Session(Runner(base), drafter)
        steps = [session.run(prompt, NUM_TOKENS, {EOS}).steps[1:] for prompt in prompts]
        ours = sum(step.emitted for one in steps for step in one) / sum(map(len, steps))
        assert ours > 1.1
        # llama.cpp drafts behind the limit of a text, and never accepts a drafted end of a text.
        assert by_name[name].acceptance.length.value == pytest.approx(ours, rel=0.06), name
