"""vLLM's schedule of draft lengths by the number of requests, which it leaves to proposers of the kind of ours."""

import pytest

FEW = 2  # requests that get whole chains


def drafted(engine):
    """How many tokens were drafted so far, and in how many drafts of one request."""
    counted = {metric.name: metric.value for metric in engine.llm.get_metrics() if hasattr(metric, "value")}
    return [counted[f"vllm:spec_decode_num_{name}"] for name in ("draft_tokens", "drafts")]


@pytest.fixture(scope="module", params=[("text", 0), ("parallel", 0), ("parallel", 1)], ids=str)
def served(request, start, trained):
    """An engine that drafts at most as many tokens for more than a few requests, and that number."""
    kind, longest = request.param
    schedule = {"num_speculative_tokens_per_batch_size": [[1, FEW, 6], [FEW + 1, FEW + 1, longest]]}
    return start(kind, "anpd" if kind == "text" else trained("ctc"), speculative=schedule), longest


def test_many_requests_get_short_chains_and_few_get_whole_ones_again(served, prompts, expected):
    engine, longest = served
    for number in (8, FEW, 8, 1):  # a drafter that paused goes on
        before = drafted(engine)
        outputs = engine.generate(prompts[:number], ignore_eos=True)  # so that all end together, without chains
        tokens, drafts = (after - of for after, of in zip(drafted(engine), before, strict=True))
        for output, text in zip(outputs, expected, strict=False):
            assert list(output.outputs[0].token_ids)[: len(text)] == text
        if number <= FEW:
            assert tokens > 1.5 * drafts > 0
        elif longest == 0:
            assert tokens == 0
        else:
            assert tokens <= 6 * 8 * FEW + drafts  # in its last steps FEW requests may be left
