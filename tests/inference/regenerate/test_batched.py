"""Batches of prompts, and how they are decoded."""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from inference.generation import generate
from inference.options import SamplingOptions
from inference.regenerate.answerers import Request, decode_batch
from inference.regenerate.command import batches_of
from inference.verifier.base import Base

RNG = random.Random(1)
PROMPTS = [[RNG.randrange(3, 40) for _ in range(RNG.randrange(1, 20))] for _ in range(14)]
LIMITS = [RNG.randrange(1, 40) for _ in PROMPTS]


@cache
def generated(base):
    """What transformers' generate writes for each prompt."""
    texts = []
    for prompt, limit in zip(PROMPTS, LIMITS, strict=True):
        ids = torch.tensor([prompt])
        texts.append(base.greedy(ids, torch.ones_like(ids), limit)[0].tolist())
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("size", [1, 3, 14])
def test_every_row_of_a_batch_is_what_generate_writes_for_its_prompt(make_base, kind, size):
    base = make_base(kind)
    expected = generated(base)
    assert len(set(map(len, expected))) > 5, "rows end at different times"
    assert any(len(answer) < limit for answer, limit in zip(expected, LIMITS, strict=True)), "some end by themselves"
    written = [
        answer
        for first in range(0, 14, size)
        for answer in decode_batch(base, PROMPTS[first : first + size], LIMITS[first : first + size])
    ]
    assert written == expected


def test_prompts_of_equal_length_are_attended_without_a_mask(make_base, monkeypatch):
    masks, attention = [], torch.nn.functional.scaled_dot_product_attention

    def seen(*given, attn_mask=None, **options):
        masks.append(attn_mask)
        return attention(*given, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    base, prompt = make_base("llama"), PROMPTS[0]
    decode_batch(base, [prompt, prompt[::-1]], [3, 3])
    assert masks and all(mask is None for mask in masks)
    decode_batch(base, [prompt, prompt[1:]], [3, 3])
    assert any(mask is not None for mask in masks)


# Prompt lengths of 64 of the first 600 conversations of Dolly with SmolLM2's chat template: the four longest, then each
# tenth.
LENGTHS = [2611, 2285, 980, 919, 803, 448, 306, 228, 192, 163, 137, 111, 84, 73, 68, 65, 62, 60, 58, 54, 52, 51, 48, 47]
LENGTHS += [46, 46, 45, 45, *[44] * 4, 43, 43, *[42] * 3, *[41] * 5, *[40] * 3, *[39] * 5, *[38] * 4, *[37] * 3]
LENGTHS += [36, 36, 36, 35, 35, 35, 34]


def test_a_limit_of_tokens_keeps_long_prompts_from_padding_short_ones():
    requests = {
        index: Request([], [1] * length, 8) for index, length in enumerate(random.Random(2).sample(LENGTHS, 64))
    }

    def num_padded(max_tokens):
        batches = [list(batch.values()) for batch in batches_of(requests, 64, max_tokens)]
        ordered = [len(request.prompt) for batch in batches for request in batch]
        assert ordered == sorted(LENGTHS, reverse=True)
        sizes = [len(batch[0].prompt) * len(batch) for batch in batches]
        assert all(size <= max_tokens or len(batch) == 1 for size, batch in zip(sizes, batches, strict=True))
        return sum(sizes)

    assert num_padded(1 << 30) == 64 * 2611
    assert num_padded(8192) * 7 < num_padded(1 << 30)
    assert num_padded(1) == sum(LENGTHS), "a prompt above the limit is read alone"


def test_a_base_with_a_sliding_window_is_refused_in_one_line():
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 16)
    heads = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    base = Base("windowed", MistralForCausalLM(MistralConfig(**sizes, **heads, sliding_window=4)).eval(), None)
    with pytest.raises(ValueError, match=r"^windowed has layers without full attention \(.*\)$"):
        decode_batch(base, [[1, 2]], [3])


def test_every_sampled_row_is_what_generate_writes_under_its_seed_in_any_batch(make_base):
    base, options = make_base(), SamplingOptions(temperature=1.3, top_k=20, top_p=0.9, seed=100)
    samplers = [replace(options, seed=options.seed + row).sampler() for row in range(len(PROMPTS))]
    whole = generate(base, PROMPTS, max_new_tokens=max(LIMITS), **vars(options))
    expected = [text.token_ids[:limit] for text, limit in zip(whole, LIMITS, strict=True)]
    for order in (list(range(len(PROMPTS))), [5, 0, 13, 7]):
        prompts, limits, drawn, right = ([each[row] for row in order] for each in (PROMPTS, LIMITS, samplers, expected))
        assert decode_batch(base, prompts, limits, drawn) == right
    assert decode_batch(base, prompts, limits) != right, "the draws are no argmax"
