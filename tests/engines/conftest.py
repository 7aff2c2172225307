"""The shipped base in vLLM on the CPU, drafters trained for it, and the texts that it writes without a drafter.

These tests need vLLM, which has an environment of its own: `make test-engines`.
"""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process, so that tests see its proposer
os.environ["VLLM_DISABLE_COMPILE_CACHE"] = "1"  # compiled models are kept by the drafter's folder, which is a new one

import gc
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from data import benchmarks
from data.conversations import user_message
from data.tokenizer import tokenizer_hash
from drafters import checkpoint, recipe, registry
from inference.prompts import encode_messages
from inference.verifier.base import load_base
from inference.verifier.runner import Runner
from inference.verifier.session import Session
from tests.inference.conftest import train_briefly

NUM_PROMPTS, NUM_TOKENS, CHAIN, NUM_STEPS = 12, 64, 6, 70
BASE, EOS = "checkpoints/tiny-chat", 2
ROOM = "inference.vllm"
CLASSES = {"parallel": f"{ROOM}.parallel_proposer.ParallelProposer", "text": f"{ROOM}.text_proposer.TextProposer"}
OPTIONS = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 8, "block_size": 32, "max_model_len": 512}
RECIPES = {
    "ctc": {
        "class_path": "drafters.CTC",
        "init_args": {
            "trunk": {
                "num_frames": 8,
                "tokens_in_context": True,
                "lookup": True,
                "copy": True,
                "markov_rank": 16,
                "markov_factors": "base",
            },
            "loss": {"num_labels": 6, "num_anchors": 16},
            "draft": {"top_k": 4},
        },
    },
    "block": {
        "class_path": "drafters.Block",
        "init_args": {
            "trunk": {"num_frames": 6, "num_layers": 2, "hidden_layers": [2, 5, -1], "markov_rank": 16},
            "loss": {"num_anchors": 16},
            "draft": {"top_k": 4},
        },
    },
    "medusa": {
        "class_path": "drafters.Medusa",
        "init_args": {"heads": {"num_heads": 4}, "loss": {"num_anchors": 32}, "draft": {}},
    },
    "eagle": {"class_path": "drafters.EAGLE", "init_args": {"fc_bias": False, "draft": {}}},
    "eagle3": {
        "class_path": "drafters.EAGLE3",
        "init_args": {
            "hidden_layers": [2, 4, 6],
            "own_head": True,
            "draft_vocab_size": 900,
            "loss": {"num_unroll": 2},
            "draft": {},
        },
    },
}


@dataclass(frozen=True)
class Engine:
    """A vLLM engine in this process."""

    llm: Any

    @property
    def runner(self):
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    @property
    def proposer(self):
        return self.runner.drafter

    def generate(self, prompts, **sampling):
        """The outputs of some prompts at once; greedy by default."""
        from vllm import SamplingParams

        params = SamplingParams(**{"temperature": 0, "max_tokens": NUM_TOKENS} | sampling)
        return self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    def texts(self, prompts):
        """The greedy tokens of some prompts at once, and how many steps they took together after their prefills."""
        before = self.proposer.num_drafts
        texts = [list(output.outputs[0].token_ids) for output in self.generate(prompts)]
        return texts, self.proposer.num_drafts - before - len(prompts)


@pytest.fixture(scope="session")
def tiny_chat():
    return load_base(BASE)


@pytest.fixture(scope="session")
def prompts(tiny_chat):
    questions = benchmarks.load_questions("embedded")[:NUM_PROMPTS]
    return [encode_messages(tiny_chat, [user_message(question.turns[0])], "tokenizer") for question in questions]


@pytest.fixture(scope="session")
def expected(tiny_chat, prompts):
    """What transformers' own `generate` writes after each prompt."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    texts = tiny_chat.greedy(ids, mask, NUM_TOKENS).tolist()
    return [text[: text.index(EOS) + 1] if EOS in text else text for text in texts]


@pytest.fixture(scope="session")
def trained(tiny_chat, prompts, expected, tmp_path_factory):
    """Makes the folder of a drafter, trained on the expected texts until it guesses many of their tokens."""

    def train(name):
        class_path, init_args = RECIPES[name]["class_path"], RECIPES[name]["init_args"]
        texts = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
        width = max(map(len, texts))
        ids = torch.tensor([text + [EOS] * (width - len(text)) for text in texts])
        mask = torch.zeros_like(ids, dtype=torch.bool)
        for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            mask[row, len(prompt) - 1 : len(text)] = True
        torch.manual_seed(0)
        drafter = recipe.build(registry.find_class(class_path), tiny_chat.shape, init_args)
        num_steps = NUM_STEPS if name in ("ctc", "block") else NUM_STEPS // 2  # the others learn faster
        train_briefly(drafter, tiny_chat, ids, num_steps, 4e-3, mask)
        folder, vocabulary = tmp_path_factory.mktemp(name), tokenizer_hash(tiny_chat.tokenizer)
        config = checkpoint.DrafterConfig(class_path, init_args, tiny_chat.shape, BASE, vocabulary)
        checkpoint.save(folder, drafter, config)
        return folder

    return cache(train)


@pytest.fixture(scope="session")
def count_own_steps(tiny_chat, prompts, expected):
    """Decodes the prompts with this project's engine, and returns the number of steps after the prefills."""

    def count(build):
        runner, num_steps = Runner(tiny_chat), 0
        for prompt, text in zip(prompts, expected, strict=True):
            session = Session(runner, build())
            session.begin(prompt)
            steps = list(session.steps(len(prompt) + NUM_TOKENS, tiny_chat.eos, drafts_at_once=False))
            assert [token for emitted, _ in steps for token in emitted] == text
            num_steps += len(steps) - 1
        return num_steps

    return count


@contextmanager
def llvmlite_unseen():
    """Hide a module of numba's from vLLM 0.32, which looks at the attributes of every module and fails at one of it.

    Therefore numba, and with it this project, has to be imported by the engine and not before it. These tests import
    it for the engine that they compare with.
    """
    hidden = sys.modules.pop("llvmlite.binding.ffi")
    try:
        yield
    finally:
        sys.modules["llvmlite.binding.ffi"] = hidden


@pytest.fixture(scope="module")
def start():
    """Starts engines, which end with the module."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    started = []

    def make(kind, drafter, speculative=None, **options):
        speculative = {"method": "custom_class", "model": CLASSES[kind], "num_speculative_tokens": CHAIN} | (
            speculative or {}
        )
        own = {"speculative_config": speculative, "additional_config": {"drafter": str(drafter), "greedy_only": True}}
        with llvmlite_unseen():
            llm = LLM(BASE, disable_log_stats=False, **OPTIONS | own | options)
        started.append(llm)
        return Engine(llm)

    yield make
    for llm in started:
        llm.llm_engine.engine_core.shutdown()
    started.clear()
    cleanup_dist_env_and_memory()
    gc.collect()
