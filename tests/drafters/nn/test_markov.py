"""The Markov bias."""

import pytest
import torch

from drafters import BaseWeights
from drafters.nn.markov import BaseMarkov, Markov
from tests.drafters.conftest import in_float64


def test_training_starts_without_a_bias_and_can_learn_one():
    markov = Markov(num_tokens=5, rank=2, num_columns=6)
    bias = markov(torch.tensor([[0, 3], [4, 4]]))
    assert bias.shape == (2, 2, 6)
    assert bias.eq(0).all()
    bias[0, 0, 5].backward()
    assert markov.right.grad[5].ne(0).any()


@pytest.fixture
def base_markov(shape):
    def make(has_blank):
        markov = BaseMarkov(shape, 3, has_blank).double()
        generator = torch.Generator().manual_seed(0)
        for weight in markov.parameters():
            torch.nn.init.normal_(weight, generator=generator)
        return markov

    return make


@pytest.mark.parametrize("has_blank", [False, True])
def test_the_factors_from_the_base_are_maps_of_its_normed_embedding_and_of_its_head(
    base_markov, shape, base_weights, has_blank
):
    markov, wide = base_markov(has_blank), in_float64(base_weights)
    tokens = torch.tensor([[3, 22], [0, 3]])
    left, right = markov.factors(tokens, wide)
    for place in ((0, 0), (0, 1), (1, 0), (1, 1)):
        embedded = wide.embedding[tokens[place]]
        normed = embedded / (embedded.square().mean() + shape.norm_eps).sqrt()
        torch.testing.assert_close(left[place], markov.left @ normed)
    assert len(right) == shape.vocab_size + has_blank
    for token in (0, 7, 22):
        torch.testing.assert_close(right[token], markov.right @ wide.head[token])
    if has_blank:
        assert torch.equal(right[-1], markov.blank[0])


@pytest.mark.parametrize("has_blank", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_folded_tables_give_the_bias_of_the_factors(base_markov, base_weights, has_blank, dtype, monkeypatch):
    monkeypatch.setattr("drafters.nn.markov.FOLDED_ROWS", 5)  # the 23 tokens take several parts
    markov = base_markov(has_blank).to(dtype)
    weights = BaseWeights(base_weights.embedding.to(dtype), base_weights.head.to(dtype))
    tables, tokens = markov.folded(weights), torch.tensor([0, 4, 5, 22])
    left, right = markov.factors(tokens, weights)
    assert tables.left.dtype == torch.promote_types(dtype, torch.float32) and not tables.left.requires_grad
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 0.05, "atol": 0.5}
    torch.testing.assert_close(tables(tokens), (left @ right.T).detach(), **tolerance)
    assert tables.folded() is tables


def test_training_starts_without_a_bias_from_the_base_and_can_learn_one(shape, base_weights):
    markov = BaseMarkov(shape, 3, has_blank=True)
    left, right = markov.factors(torch.tensor([1, 2]), base_weights)
    bias = left @ right.T
    assert bias.shape == (2, 24) and bias.eq(0).all()
    bias[0, [4, 23]].sum().backward()
    assert markov.right.grad.ne(0).any() and markov.blank.grad.ne(0).any()


def test_factors_from_the_base_are_the_same_under_autocast(base_markov, base_weights):
    markov, tokens = base_markov(True).float(), torch.tensor([1, 5])
    plain = markov.factors(tokens, base_weights)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = markov.factors(tokens, base_weights)
    assert all(torch.equal(one, other) for one, other in zip(plain, mixed, strict=True))


def test_a_bias_of_bfloat16_weights_is_summed_in_float32():
    markov = Markov(num_tokens=5, rank=3, num_columns=6)
    torch.nn.init.normal_(markov.right)
    markov = markov.bfloat16()
    torch.testing.assert_close(markov(torch.arange(5)), markov.left.float() @ markov.right.float().T)
