"""Calling the layers directly gives the hidden states of the model's own forward, with both caches."""

import pytest
import torch

from inference.verifier.attention import Fed, causal_tree_mask
from inference.verifier.cache import BufferCache
from inference.verifier.layers import run_base

KINDS = [(kind, attention) for kind in ("llama", "qwen2", "gpt2") for attention in ("sdpa", "eager")]


@pytest.mark.parametrize(("kind", "attention"), KINDS)
@torch.inference_mode()
def test_hidden_states_are_those_of_the_models_own_forward(make_base, kind, attention):
    model = make_base(kind, attention, layers=3).model
    text = torch.tensor([[5, 6, 7, 8, 9, 10]])
    expected = model.base_model(text, output_hidden_states=True)
    held = BufferCache(3)
    for start, end in ((0, 3), (3, 4), (4, 6)):
        mask = None
        if end - start > 1:
            mask = causal_tree_mask(end - start, (), torch.float64, "cpu")
            mask = torch.nn.functional.pad(mask, (start, 0))[None, None]
        positions = torch.arange(start, end)[None]
        fed = Fed(text[:, start:end], positions, {"full_attention": mask}, held)
        _, states = run_base(model, fed, 1, (0, 2, 3, -1))
        for layer in (0, 2, 3):
            found = expected.hidden_states[layer][:, start:end]
            torch.testing.assert_close(states[layer], found, rtol=0, atol=1e-9 if attention == "sdpa" else 1e-4)
        assert torch.equal(states[-1], states[3])
        assert set(states) >= {0, 2, 3, -1} and (kind == "gpt2" or 1 not in states)
