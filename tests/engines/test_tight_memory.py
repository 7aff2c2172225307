"""An engine with little memory: prompts are read in pieces, and requests are preempted and read again."""

import pytest
import torch

from train.cli import run_drafters

NUM_TOKENS = 32
EAGLE3_CHAIN = 4
# 20 blocks of 32 tokens hold about four of the eight texts that may run at once.
TIGHT = {"num_gpu_blocks_override": 20, "max_num_batched_tokens": 48, "max_model_len": 256}


@pytest.fixture(scope="module", params=["ctc", "block", "anpd", "joint:runner_up=0", "eagle3"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def engine(name, start, trained, tmp_path_factory):
    if name in ("ctc", "block"):
        return start("parallel", trained(name), **TIGHT)
    if name != "eagle3":
        return start("text", name, **TIGHT)
    folder = str(tmp_path_factory.mktemp("exported") / name)
    run_drafters(["export", str(trained(name)), folder, "--format", "vllm", "--dtype", "float32"])
    speculative = {"method": name, "model": folder, "num_speculative_tokens": EAGLE3_CHAIN}
    return start("text", "", speculative_config=speculative, additional_config={}, **TIGHT)


def texts_of(engine, prompts):
    return [list(output.outputs[0].token_ids) for output in engine.generate(prompts)]


def test_texts_are_the_same_when_prompts_are_read_in_pieces_and_requests_are_preempted(engine, prompts, expected):
    assert texts_of(engine, prompts) == expected
    metrics = {metric.name: metric.value for metric in engine.llm.get_metrics() if hasattr(metric, "value")}
    assert metrics["vllm:num_preemptions"] > 0


def test_the_text_of_a_prompt_that_is_in_the_cache_is_the_base_s_own(engine, tiny_chat, prompts):
    prompt = [token for other in prompts[:3] for token in other]
    ids = torch.tensor([prompt])
    (text,) = tiny_chat.greedy(ids, torch.ones_like(ids), NUM_TOKENS).tolist()
    outputs = [engine.generate([prompt], max_tokens=NUM_TOKENS)[0] for _ in range(2)]
    assert [list(output.outputs[0].token_ids) for output in outputs] == [text, text]
    assert outputs[0].num_cached_tokens < outputs[1].num_cached_tokens


@pytest.mark.parametrize("name", ["ctc", "block"], indirect=True)
def test_a_prompt_in_pieces_takes_as_many_steps(engine, prompts, expected):
    prompt = max(prompts, key=len)
    whole, steps = engine.texts([prompt])
    engine.llm.reset_prefix_cache()
    assert engine.texts([prompt]) == (whole, steps)
    assert whole == [expected[prompts.index(prompt)]]
