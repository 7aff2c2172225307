"""The rotary position embedding, compared with transformers' own."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from drafters.nn.transformer import RotaryEmbedding
from drafters.protocol import BaseShape

SIZES = {"hidden_size": 64, "vocab_size": 9, "num_layers": 1, "num_heads": 1, "head_dim": 64, "intermediate_size": 8}
# Each places the borders between scaled and other frequencies elsewhere; the second is that of Llama 3.1.
SCALINGS = [None, (8.0, 1.0, 4.0, 8192), (32.0, 0.5, 2.0, 64), (2.0, 1.0, 1.5, 1000)]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_the_angles_are_those_of_transformers(scaling, theta):
    own, its = {}, {"rope_type": "default", "rope_theta": theta}
    if scaling:
        factor, low, high, length = scaling
        own = {"rope_factor": factor, "rope_low_frequency": low, "rope_high_frequency": high}
        own["rope_original_length"] = length
        its = {"rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": low}
        its |= {"high_freq_factor": high, "original_max_position_embeddings": length}
    rotary = RotaryEmbedding(BaseShape(**SIZES, rope_theta=theta, **own))
    expected = LlamaRotaryEmbedding(LlamaConfig(head_dim=64, max_position_embeddings=1 << 17, rope_parameters=its))
    torch.testing.assert_close(rotary.frequencies(torch.device("cpu")), expected.inv_freq, rtol=1e-6, atol=0)
    positions = torch.tensor([[0, 1, 7, 500]])
    cos, sin = expected(torch.zeros(1), positions)
    torch.testing.assert_close(rotary(positions), (cos[:, None], sin[:, None]), rtol=0, atol=2e-4)
    kept = rotary.frequencies(torch.device("cpu")) / theta ** (-torch.arange(32) / 32)
    assert kept.max() == pytest.approx(1) and kept.min() == pytest.approx(1 / own.get("rope_factor", 1))
