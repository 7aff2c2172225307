"""A base under tensor parallelism of two CPU processes: the texts are those of the whole base."""

import pytest


@pytest.mark.slow
def test_texts_are_the_same_and_drafts_are_accepted(start, trained, prompts, expected):
    engine = start("parallel", trained("ctc"), tensor_parallel_size=2)
    assert [list(output.outputs[0].token_ids) for output in engine.generate(prompts)] == expected
    counted = {metric.name: metric.value for metric in engine.llm.get_metrics() if hasattr(metric, "value")}
    assert counted["vllm:spec_decode_num_accepted_tokens"] > len(prompts)
