import random

import pytest
import torch

from inference.regeneration.batched import greedy_batch


def alone(base, prompt, room):
    ids = torch.tensor([prompt])
    return base.greedy(ids, torch.ones_like(ids), room)[0].tolist()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("size", [1, 3, 14])
def test_a_batch_writes_what_transformers_generate_writes_alone(make_base, kind, size):
    base, rng = make_base(kind), random.Random(1)
    prompts = [[rng.randrange(3, 40) for _ in range(rng.randrange(1, 20))] for _ in range(14)]
    rooms = [rng.randrange(1, 40) for _ in prompts]
    expected = [alone(base, prompt, room) for prompt, room in zip(prompts, rooms, strict=True)]
    assert len(set(map(len, expected))) > 5, "rows end at different times"
    assert any(len(answer) < room for answer, room in zip(expected, rooms, strict=True)), "some end by themselves"
    written = [
        answer
        for first in range(0, 14, size)
        for answer in greedy_batch(base, prompts[first : first + size], rooms[first : first + size])
    ]
    assert written == expected


def test_a_base_with_a_sliding_window_is_refused_in_one_line():
    from transformers import MistralConfig, MistralForCausalLM

    from inference.engine.base import Base

    config = MistralConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=4,
    )
    base = Base("windowed", MistralForCausalLM(config).eval(), None)
    with pytest.raises(ValueError, match=r"^windowed has layers that are not full attention \(.*\)$"):
        greedy_batch(base, [[1, 2]], [3])
