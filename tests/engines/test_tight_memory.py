"""An engine with little memory: prompts are read in pieces, and requests are preempted and read again."""

import pytest


@pytest.fixture(scope="module")
def engine(start, trained):
    # 20 blocks of 32 tokens hold about four of the eight texts that may run at once.
    return start("parallel", trained("ctc"), num_gpu_blocks_override=20, max_num_batched_tokens=48, max_model_len=256)


def test_texts_are_the_same_when_prompts_are_read_in_pieces_and_requests_are_preempted(engine, prompts, expected):
    texts, _ = engine.texts(prompts)
    assert texts == expected
    metrics = {metric.name: metric.value for metric in engine.llm.get_metrics() if hasattr(metric, "value")}
    assert metrics["vllm:num_preemptions"] > 0


def test_a_prompt_in_pieces_takes_as_many_steps(engine, prompts, expected):
    prompt = max(prompts, key=len)
    whole, steps = engine.texts([prompt])
    engine.llm.reset_prefix_cache()
    assert engine.texts([prompt]) == (whole, steps)
    assert whole == [expected[prompts.index(prompt)]]
