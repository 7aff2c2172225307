"""The Markov bias."""

import pytest
import torch

from drafters.learned.layers.markov import Markov


def test_training_starts_without_a_bias_and_can_learn_one():
    markov = Markov(num_tokens=5, rank=2, num_columns=6)
    bias = markov(torch.tensor([[0, 3], [4, 4]]))
    assert bias.shape == (2, 2, 6)
    assert bias.eq(0).all()
    bias[0, 0, 5].backward()
    assert markov.right.grad[5].ne(0).any()


def test_the_bias_is_the_product_of_its_factors():
    markov = Markov(num_tokens=5, rank=2, num_columns=6)
    torch.nn.init.normal_(markov.right)
    torch.testing.assert_close(markov(torch.arange(5)), markov.left @ markov.right.T)


def test_a_bias_without_rank_is_refused():
    with pytest.raises(ValueError, match="rank"):
        Markov(5, 0, 5)


def test_a_bias_of_bfloat16_weights_is_summed_in_float32():
    markov = Markov(num_tokens=5, rank=3, num_columns=6)
    torch.nn.init.normal_(markov.right)
    markov = markov.bfloat16()
    torch.testing.assert_close(markov(torch.arange(5)), markov.left.float() @ markov.right.float().T)
