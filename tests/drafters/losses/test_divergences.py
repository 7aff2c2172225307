"""Divergences of a draft's distribution from the base's, against rejection sampling and each other."""

import pytest
import torch

from drafters.losses.divergences import acceptance, divergence
from drafters.losses.label_loss import LabelLossOptions

KINDS = ["kl", "tv", "lk", "lk_hybrid"]


@pytest.fixture
def base():
    return torch.randn(50, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(-1)


@pytest.fixture
def draft():
    """Distributions that stop with some probability."""
    scores = 2 * torch.randn(50, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return scores.softmax(-1)[:, :-1]


def test_the_acceptance_is_the_probability_that_rejection_sampling_keeps_a_drawn_token(base, draft):
    torch.testing.assert_close(acceptance(base, draft), (draft * (base / draft).clamp(max=1)).sum(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_that_misses_everything_has_a_finite_divergence_and_gradient(kind):
    base, draft = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 0.0], requires_grad=True)
    loss = divergence(kind, base, draft)
    loss.backward()
    assert loss.isfinite() and draft.grad.isfinite().all()


def test_the_weights_of_distillation_and_labels_change_linearly_over_the_steps():
    options = LabelLossOptions(distillation=2.0, label_weight=0.2, distillation_steps=4)
    weights = [(now.distillation, now.label_weight) for now in map(options.at_step, (0, 1, 3, 99))]
    assert weights == [pytest.approx(pair) for pair in ((0.5, 0.8), (1.0, 0.6), (2.0, 0.2), (2.0, 0.2))]
    constant = LabelLossOptions(distillation=2.0, label_weight=0.2)
    assert constant.at_step(0) == constant


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_to_bfloat16_leaves_a_small_divergence_as_exact_as_it_is(kind):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(50, 1000, generator=generator)
    base, draft = scores.softmax(-1), (scores + 0.02 * torch.randn(50, 1000, generator=generator)).softmax(-1)
    expected = divergence(kind, base.double(), draft.double()).float()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(divergence(kind, base, draft), expected, rtol=0.05, atol=0)


@pytest.mark.parametrize("unused", [{"divergence": "tv"}, {"teacher_temperature": 0.0}])
def test_options_of_distillation_are_refused_without_it(unused):
    with pytest.raises(ValueError, match="belong to distillation, which is 0: raise it"):
        LabelLossOptions(**unused)
