"""The layers of learned drafters: rotary positions as transformers has them, norms in mixed precision, the cache."""

import warnings

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from drafters.nn.anchor_attention import AnchorMask
from drafters.nn.draft_cache import DraftCache
from drafters.nn.transformer import RMSNorm, RotaryEmbedding, Trunk
from drafters.protocol import BaseShape

SIZES = {"hidden_size": 64, "vocab_size": 9, "num_layers": 1, "num_heads": 1, "head_dim": 64, "intermediate_size": 8}
# Each places the borders between scaled and other frequencies elsewhere; the second is that of Llama 3.1.
SCALINGS = [None, (8.0, 1.0, 4.0, 8192), (32.0, 0.5, 2.0, 64), (2.0, 1.0, 1.5, 1000)]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_the_angles_are_those_of_transformers(scaling, theta):
    llama3, rope = {}, {"rope_type": "default", "rope_theta": theta}
    if scaling:
        factor, low, high, length = scaling
        llama3 = {"rope_factor": factor, "rope_low_frequency": low, "rope_high_frequency": high}
        llama3["rope_original_length"] = length
        rope = {"rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": low}
        rope |= {"high_freq_factor": high, "original_max_position_embeddings": length}
    rotary = RotaryEmbedding(BaseShape(**SIZES, rope_theta=theta, **llama3))
    expected = LlamaRotaryEmbedding(LlamaConfig(head_dim=64, max_position_embeddings=1 << 17, rope_parameters=rope))
    torch.testing.assert_close(rotary.frequencies(torch.device("cpu")), expected.inv_freq, rtol=1e-6, atol=0)
    positions = torch.tensor([[0, 1, 7, 500]])
    cos, sin = expected(torch.zeros(1), positions)
    torch.testing.assert_close(rotary(positions), (cos[:, None], sin[:, None]), rtol=0, atol=2e-4)
    kept = rotary.frequencies(torch.device("cpu")) / theta ** (-torch.arange(32) / 32)
    assert kept.max() == pytest.approx(1) and kept.min() == pytest.approx(1 / llama3.get("rope_factor", 1))


def test_a_norm_takes_states_of_another_dtype_than_its_weights_without_a_warning():
    """Under autocast a projection returns bfloat16; the result equals that in float32."""
    norm = RMSNorm(8, eps=1e-6)
    torch.nn.init.normal_(norm.weight)
    states = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True)
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("error")
        normed = norm(states)
    wide = states.detach().float()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
    assert normed.dtype == torch.float32
    torch.testing.assert_close(normed, expected)
    (gradient,) = torch.autograd.grad(normed.sum(), states)
    assert gradient.dtype == torch.bfloat16 and gradient.isfinite().all()


def test_the_draft_cache_grows_beyond_its_first_capacity():
    cache, held = DraftCache(), [[], []]
    for length in (5, 1, 250, 1, 300, 3, 1500, 1):
        new = [(torch.randn(1, 2, length, 4), torch.randn(1, 2, length, 4)) for _ in range(2)]
        cache.append(new)
        for layer in range(2):
            held[layer].append(new[layer])
            for got, expected in zip(cache.read()[layer], zip(*held[layer], strict=True), strict=True):
                assert torch.equal(got, torch.cat(expected, -2))
    assert cache.length == 2061


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("num_key_heads", [1, 2, 3])
@torch.no_grad()
def test_heads_that_share_keys_are_heads_with_equal_keys_under_every_form_of_mask(num_key_heads):
    shape = BaseShape(**SIZES | {"num_heads": 6, "head_dim": 8})
    grouped, whole = Trunk(shape, 1, 1, num_key_heads=num_key_heads), Trunk(shape, 1, 1)
    weights = grouped.state_dict()
    for name in ("layers.0.self_attn.k_proj.weight", "layers.0.self_attn.v_proj.weight"):
        heads = weights[name].unflatten(0, (num_key_heads, -1))
        weights[name] = heads.repeat_interleave(6 // num_key_heads, 0).flatten(0, 1)
    whole.load_state_dict(weights)
    hidden, frames = torch.randn(2, 9, 64), torch.randn(2, 6, 64)
    anchors = torch.tensor([[4, 8], [1, 6]])
    places = (anchors[..., None] + torch.arange(3)).flatten(1)
    mask = AnchorMask(anchors, 3, 9, causal=False)
    for form in (mask.dense(), mask.pieces(), mask.sparse()):
        context = grouped.context(hidden, torch.arange(9)[None])
        assert context[0][0].shape[1] == num_key_heads
        expected = whole(frames, places, whole.context(hidden, torch.arange(9)[None]), mask.dense())
        torch.testing.assert_close(grouped(frames, places, context, form), expected, rtol=0, atol=1e-5)
