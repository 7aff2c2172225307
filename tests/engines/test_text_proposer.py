"""Drafters that read only tokens, in vLLM: the texts are the base's own, and the chains are those of our own engine."""

import pytest

from inference.serving.vllm.served_drafter import ServedBase, chain_builder
from inference.serving.vllm.text_proposer import Followers


@pytest.fixture(scope="module")
def engine(start):
    return start("text", "anpd")


@pytest.fixture(params=["anpd", "joint:runner_up=0"])
def build(request, engine, tiny_chat):
    base = ServedBase(tiny_chat.name, tiny_chat.tokenizer, tiny_chat.shape)
    return chain_builder(request.param, base, engine.proposer.num_tokens)


def test_one_text_at_a_time_takes_the_steps_of_our_own_chain(build, engine, prompts, expected, count_own_steps):
    """With a new drafter for every text: what vLLM drops behind the end of a text, Joint would remember."""
    texts, steps = [], 0
    for prompt in prompts:
        engine.proposer.followers = Followers(build)
        own, count = engine.texts([prompt])
        texts, steps = texts + own, steps + count
    assert texts == expected
    assert steps == count_own_steps(build) < sum(map(len, expected)) - len(prompts)


def test_eight_texts_at_a_time_are_the_same(build, engine, prompts, expected):
    engine.proposer.followers = Followers(build)
    texts, steps = engine.texts(prompts)
    assert texts == expected
    assert steps < sum(map(len, expected)) - len(prompts)
    assert 1 < len(engine.proposer.followers) <= 8
