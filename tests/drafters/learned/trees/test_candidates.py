"""Candidates and their probabilities, against the softmax over the full vocabulary."""

import pytest
import torch

from drafters.learned.layers.markov import Markov
from drafters.learned.trees.candidates import tables

A, T, V = 3, 4, 9


@pytest.fixture
def logits():
    return torch.randn(A, T, V + 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture
def markov():
    made = Markov(V, 3, V + 1).double()
    with torch.no_grad():
        made.right.normal_(generator=torch.Generator().manual_seed(1))
    return made


def test_candidates_are_the_tokens_most_probable_in_any_frame(logits):
    for anchor, (_, tokens) in enumerate(tables(logits, torch.zeros(A, dtype=torch.long), V, 5)):
        highest = logits[anchor].softmax(-1)[:, :V].amax(0)
        assert set(tokens) == set(highest.argsort(descending=True)[:5].tolist())
        assert len(set(tokens)) == 5


@pytest.mark.parametrize("num_candidates", [1, 5, V, 99])
def test_their_probabilities_equal_those_of_the_frames(logits, num_candidates):
    for anchor, (probs, tokens) in enumerate(tables(logits, torch.zeros(A, dtype=torch.long), V, num_candidates)):
        distribution = logits[anchor].softmax(-1)
        assert probs.shape == (1, T, min(num_candidates, V) + 1)
        torch.testing.assert_close(torch.tensor(probs[0, :, :-1]), distribution[:, tokens])
        torch.testing.assert_close(torch.tensor(probs[0, :, -1]), distribution[:, V])


def test_without_a_blank_there_is_no_column_for_it(logits):
    (probs, tokens), *_ = tables(logits[..., :V], torch.zeros(A, dtype=torch.long), V, 4)
    assert probs.shape == (1, T, 4)
    torch.testing.assert_close(torch.tensor(probs[0]), logits[0, :, :V].softmax(-1)[:, tokens])


def test_with_a_bias_row_l_is_the_distribution_after_candidate_l_and_the_last_row_after_the_root(logits, markov):
    roots = torch.tensor([2, 7, 0])
    with torch.no_grad():
        every = tables(logits, roots, V, 4, markov)
        for anchor, (probs, tokens) in enumerate(every):
            before = torch.cat([torch.tensor(tokens), roots[anchor : anchor + 1]])
            distribution = (logits[anchor] + markov(before)[:, None]).softmax(-1)  # (5, T, V + 1)
            columns = [*tokens.tolist(), V]
            torch.testing.assert_close(torch.tensor(probs), distribution[..., columns])


def test_distributions_with_a_bias_are_the_same_under_autocast(logits, markov):
    """Validation in mixed precision uses the same distribution as decoding."""
    logits, markov, roots = logits.float(), markov.float(), torch.tensor([2, 7, 0])
    with torch.no_grad():
        plain = tables(logits, roots, V, 4, markov)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = tables(logits, roots, V, 4, markov)
    for (probs, tokens), (others, other_tokens) in zip(plain, mixed, strict=True):
        assert (probs == others).all() and (tokens == other_tokens).all()
