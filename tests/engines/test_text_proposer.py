"""Drafters that read only tokens, in vLLM: the texts are the base's own, and the chains are those of our own engine."""

import pytest

from inference.commands import index
from inference.verifier.base import BaseConfig
from inference.vllm.served_drafter import chain_builder
from inference.vllm.text_proposer import DrafterPool


@pytest.fixture(scope="module")
def engine(start):
    return start("text", "anpd")


@pytest.fixture(scope="module")
def files(tiny_chat, expected, tmp_path_factory):
    """The specs of the drafters whose files are made of the expected texts."""
    folder = tmp_path_factory.mktemp("files")
    text = folder / "texts.txt"
    text.write_text("\n\n".join(tiny_chat.tokenizer.decode(text, skip_special_tokens=True) for text in expected))
    index("corpus", str(folder / "corpus"), tiny_chat.name, [str(text)], min_count=1)
    index("datastore", str(folder / "store"), tiny_chat.name, [str(text)])
    return {"corpus": f"corpus={folder}/corpus", "rest": f"rest={folder}/store"}


@pytest.fixture(params=["anpd", "joint:runner_up=0", "prompt_lookup", "corpus", "rest"])
def build(request, engine, tiny_chat, files):
    base = BaseConfig(tiny_chat.name, tiny_chat.tokenizer, tiny_chat.model.config)
    return chain_builder(files.get(request.param, request.param), base, engine.proposer.num_tokens)


def test_one_text_at_a_time_takes_the_steps_of_our_own_chain(build, engine, prompts, expected, count_own_steps):
    """With a new drafter for every text: what vLLM drops behind the end of a text, Joint would remember."""
    texts, steps = [], 0
    for prompt in prompts:
        engine.proposer.pool = DrafterPool(build)
        own, count = engine.texts([prompt])
        texts, steps = texts + own, steps + count
    assert texts == expected
    assert steps == count_own_steps(build) < sum(map(len, expected)) - len(prompts)
