"""The layers of learned drafters in mixed precision."""

import warnings

import torch

from drafters.nn.transformer import RMSNorm


def test_a_norm_takes_states_of_another_dtype_than_its_weights_without_a_warning():
    """Under autocast a projection returns bfloat16; the result equals that in float32."""
    norm = RMSNorm(8, eps=1e-6)
    torch.nn.init.normal_(norm.weight)
    states = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True)
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("error")
        found = norm(states)
    wide = states.detach().float()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(found.sum(), states)
    assert gradient.dtype == torch.bfloat16 and gradient.isfinite().all()
