"""CTC and block drafters in vLLM: the texts are the base's own, and the chains are those of our own engine."""

import copy

import pytest
import torch
from scipy.stats import chisquare
from torch.utils._pytree import tree_leaves

from drafters import checkpoint
from inference.verifier.base import BaseConfig
from inference.vllm.parallel_proposer import ParallelProposer
from inference.vllm.served_drafter import read_parallel, spec_of

NUM_SAMPLES = 300


@pytest.fixture(scope="module", params=["ctc", "block"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def engine(name, start, trained):
    return start("parallel", trained(name), enforce_eager=False)  # compiled, as vLLM does; test_tight_memory is eager


@pytest.fixture(scope="module")
def own_steps(name, trained, tiny_chat, count_own_steps):
    base = BaseConfig(tiny_chat.name, tiny_chat.tokenizer, tiny_chat.model.config)
    folder, config = read_parallel(spec_of(str(trained(name))), base, 6)
    drafter, _ = checkpoint.load(folder, config=config)
    drafter.attach_base_weights(tiny_chat.base_weights)
    return count_own_steps(lambda: drafter)


def test_one_text_at_a_time_takes_the_steps_of_our_own_chain(engine, prompts, expected, own_steps):
    texts, steps = [], 0
    for prompt in prompts:
        own, count = engine.texts([prompt])
        texts, steps = texts + own, steps + count
    assert texts == expected
    assert steps == own_steps < (sum(map(len, expected)) - len(prompts)) / 1.25


def test_eight_texts_at_a_time_take_as_many_steps(engine, prompts, expected, own_steps):
    texts, steps = engine.texts(prompts)
    assert texts == expected
    assert steps == own_steps


class Replayed:
    """A model as vLLM's `CUDAGraphWrapper` replays it: no hook is called, and outputs are written over each other."""

    def __init__(self, model):
        self.model, self.outputs, self.num_replays = model, {}, 0

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, **inputs):
        found = self.model.forward(**inputs)
        size = len(inputs["input_ids"])
        self.num_replays += size in self.outputs
        kept = self.outputs.setdefault(size, found)
        for static, values in zip(tree_leaves(kept), tree_leaves(found), strict=True):
            static.copy_(values)
        return kept


def test_batches_that_cuda_graphs_pad_and_replay_take_as_many_steps(engine, prompts, expected, own_steps, monkeypatch):
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import BatchDescriptor

    def padded(num_tokens, **_):
        return CUDAGraphMode.FULL, BatchDescriptor(-(-num_tokens // 64) * 64, num_reqs=8), False, None, None

    model = Replayed(engine.runner.model)
    monkeypatch.setattr(engine.runner, "model", model)
    monkeypatch.setattr(engine.runner, "_determine_batch_execution_and_padding", padded)
    engine.llm.reset_prefix_cache()
    texts, steps = engine.texts(prompts)
    assert texts == expected
    assert steps == own_steps
    assert model.num_replays > len(model.outputs)


def test_the_draft_cache_of_a_shared_prefix_is_reused(engine, tiny_chat, prompts):
    prompt = [token for other in prompts[:4] for token in other]
    (first, steps), (again, steps_again) = engine.texts([prompt]), engine.texts([prompt])
    assert first == again
    assert engine.generate([prompt], max_tokens=1)[0].num_cached_tokens >= len(prompt) - 32
    assert steps == steps_again


def test_requests_that_are_aborted_leave_the_others_as_they_are(engine, prompts, expected):
    from vllm import SamplingParams

    core, done = engine.llm.llm_engine, {}
    params = SamplingParams(temperature=0, max_tokens=len(max(expected, key=len)))
    for index, prompt in enumerate(prompts[:12]):
        core.add_request(f"abort-{index}", {"prompt_token_ids": prompt}, params)
    for _ in range(4):
        done |= {output.request_id: output for output in core.step() if output.finished}
    core.abort_request([f"abort-{index}" for index in range(0, 12, 2)])
    while core.has_unfinished_requests():
        done |= {output.request_id: output for output in core.step() if output.finished}
    for index in range(1, 12, 2):
        assert list(done[f"abort-{index}"].outputs[0].token_ids) == expected[index]


def repeated(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
    """What `expand_batch_to_tokens` should return, and does not in vLLM's CPU build 0.32."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts)


@torch.inference_mode()
def test_sampled_texts_follow_the_distribution_of_the_base(engine, tiny_chat, prompts, monkeypatch):
    """Pairs of a prefill's token, sampled without a draft, and the next one, which a draft was verified against."""
    from vllm.v1.sample import rejection_sampler

    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", repeated)
    prompt, temperature = prompts[0], 0.8
    after = torch.tensor([[*prompt, token] for token in range(tiny_chat.shape.vocab_size)])
    logits = tiny_chat.model(after, logits_to_keep=2).logits.double() / temperature
    first, second = logits[0, 0].softmax(-1), logits[:, 1].softmax(-1)
    probabilities = (first[:, None] * second).flatten()
    outputs = engine.generate([prompt], n=NUM_SAMPLES, temperature=temperature, max_tokens=2, ignore_eos=True)
    pairs = [text.token_ids[0] * len(first) + text.token_ids[1] for text in outputs[0].outputs]
    likely = probabilities.topk(40).indices.tolist()
    likely = [pair for pair in likely if probabilities[pair] * NUM_SAMPLES >= 5]
    observed = [pairs.count(pair) for pair in likely]
    expected = [float(probabilities[pair]) * NUM_SAMPLES for pair in likely]
    num_rare, expected_rare = NUM_SAMPLES - sum(observed), NUM_SAMPLES - sum(expected)
    assert len(likely) >= 4 and num_rare <= 5 * (1 + expected_rare)
    scale = sum(observed) / sum(expected)
    assert chisquare(observed, [count * scale for count in expected]).pvalue > 1e-3


@pytest.mark.parametrize(
    ("additional", "message"),
    [
        ({}, "no drafter is named"),
        ({"drafter": "no/folder"}, "loses the temperatures of requests"),
        ({"drafter": "no/folder", "greedy_only": True}, "no folder no/folder"),
        ({"drafter": "anpd", "greedy_only": True}, "cannot serve the drafter anpd"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(engine, additional, message):
    config = copy.copy(engine.llm.llm_engine.vllm_config)
    config.additional_config = additional
    with pytest.raises(ValueError, match=message) as raised:
        ParallelProposer(config)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("option", "value"), [("pipeline_parallel_size", 2), ("decode_context_parallel_size", 2), ("enable_dbo", True)]
)
def test_an_engine_that_divides_a_forward_is_refused(engine, option, value):
    config = copy.copy(engine.llm.llm_engine.vllm_config)
    config.parallel_config = copy.copy(config.parallel_config)
    setattr(config.parallel_config, option, value)
    with pytest.raises(ValueError, match=r"needs all layers and positions of a forward: vLLM's \w+ has to be 1"):
        ParallelProposer(config)


def test_a_base_whose_layers_have_several_block_tables_is_refused(engine, monkeypatch):
    config = engine.runner.kv_cache_config
    monkeypatch.setattr(config, "kv_cache_groups", config.kv_cache_groups * 2)
    with pytest.raises(ValueError, match="several KV cache groups"):
        engine.proposer._reserve()


def test_a_drafter_that_reads_tokens_needs_a_base_that_is_given_them(engine):
    config = copy.copy(engine.llm.llm_engine.vllm_config)
    config.model_config = copy.copy(config.model_config)
    config.model_config.enable_prompt_embeds = True
    if not engine.proposer.drafter.tokens_in_context:
        ParallelProposer(config)
        return
    with pytest.raises(ValueError, match="takes embeddings in place of tokens in vLLM"):
        ParallelProposer(config)
