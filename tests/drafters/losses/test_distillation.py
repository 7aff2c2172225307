"""Distillation: the base's distributions, the KL divergence of a draft's from them, and its options."""

import pytest
import torch

from drafters.losses.distillation import kl, teacher_probs
from drafters.losses.label_loss import LabelLossOptions


def test_a_draft_that_misses_everything_has_a_finite_divergence_and_gradient():
    base, draft = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 0.0], requires_grad=True)
    loss = kl(base, draft)
    loss.backward()
    assert loss.isfinite() and draft.grad.isfinite().all()


def test_autocast_to_bfloat16_leaves_a_small_divergence_as_exact_as_it_is():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(50, 1000, generator=generator)
    base, draft = scores.softmax(-1), (scores + 0.02 * torch.randn(50, 1000, generator=generator)).softmax(-1)
    expected = kl(base.double(), draft.double()).float()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(kl(base, draft), expected, rtol=0.05, atol=0)


def test_an_option_of_distillation_is_refused_without_it():
    with pytest.raises(ValueError, match="belongs to distillation, which is 0: raise it"):
        LabelLossOptions(teacher_temperature=0.0)


def test_teacher_probabilities_are_those_of_a_temperature():
    states, head = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    for temperature in (1.0, 0.4):
        expected = torch.distributions.Categorical(logits=states @ head.T / temperature).probs
        torch.testing.assert_close(teacher_probs(states, head, temperature), expected)
    certain = torch.nn.functional.one_hot((states @ head.T).argmax(-1), 6)
    assert torch.equal(teacher_probs(states, head, 0.0), certain.double())
