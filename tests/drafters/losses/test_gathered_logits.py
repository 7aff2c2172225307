"""Gathered columns and normalisers of logits, computed in place, against torch's own softmax."""

import pytest
import torch

from drafters.losses import gathered_logits


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_columns_and_normaliser_give_the_log_softmax_and_its_gradient(scale):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(4, 3, 5, generator=generator, dtype=torch.float64).mul(scale).requires_grad_()
    head = torch.randn(11, 5, generator=generator, dtype=torch.float64)
    index = torch.randint(11, (4, 3, 6), generator=generator)  # a column may be gathered twice
    exponentials, most, picked = gathered_logits.exponentials(gathered_logits.logits(states, head), index)
    log_probs = picked - gathered_logits.log_sum(exponentials, most)
    expected = (states @ head.T).log_softmax(-1).gather(-1, index)
    torch.testing.assert_close(log_probs, expected)
    weights = torch.randn(log_probs.shape, generator=generator, dtype=torch.float64)
    gradients = [torch.autograd.grad((weights * x).sum(), states) for x in (log_probs, expected)]
    torch.testing.assert_close(*gradients)


def test_the_exponentials_reuse_the_memory_of_the_logits():
    logits = torch.randn(2, 3, 7)
    exponentials, _, _ = gathered_logits.exponentials(logits, torch.zeros(2, 3, 1, dtype=torch.long))
    assert exponentials.data_ptr() == logits.data_ptr()


def test_a_second_backward_pass_over_overwritten_exponentials_is_refused():
    logits = torch.randn(1, 1, 3, requires_grad=True)
    exponentials, most, _ = gathered_logits.exponentials(logits * 1, torch.zeros(1, 1, 1, dtype=torch.long))
    loss = gathered_logits.log_sum(exponentials, most).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_products_equal_matrix_products_in_value_and_gradient():
    left, right = (torch.randn(2, n, 7, dtype=torch.float64, requires_grad=True) for n in (3, 4))
    torch.testing.assert_close(gathered_logits.products(left, right), left @ right.mT)
    assert torch.autograd.gradcheck(gathered_logits.products, (left, right))


@pytest.mark.parametrize("head_dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logits_are_at_least_float32(head_dtype):
    head = torch.randn(5, 4).to(head_dtype).requires_grad_()
    logits = gathered_logits.logits(torch.randn(2, 4, requires_grad=True), head)
    assert logits.dtype == torch.promote_types(head_dtype, torch.float32)
    logits.sum().backward()
    assert head.grad is None  # frozen
