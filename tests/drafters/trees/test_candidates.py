"""Candidates and their probabilities, against the softmax over the full vocabulary."""

import numpy as np
import pytest
import torch

from drafters.nn.markov import Markov
from drafters.nn.table import Table
from drafters.trees import candidates as module
from drafters.trees.candidates import Symbols
from drafters.trees.search import SearchLimits, search

A, T, V = 3, 4, 9


@pytest.fixture
def logits():
    return torch.randn(A, T, V + 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture
def markov():
    made = Markov(V, 3, V + 1).double()
    with torch.no_grad():
        made.left.normal_(generator=torch.Generator().manual_seed(2))
        made.right.normal_(generator=torch.Generator().manual_seed(1))
    return made.requires_grad_(False)


def choose(*arguments):
    return module.candidates(Table.of(parts := module.choose(*arguments), parts[1].dtype).on_host())


def symbols(candidates):
    """(A, T, C + e) the probabilities, the blank last if there is one."""
    blank = candidates.blank
    return torch.tensor(candidates.probs if blank is None else np.append(candidates.probs, blank[..., None], axis=2))


def distributions(candidates):
    """(A, C + 1, T, C + e) the probabilities that a search reads with a bias, from their factors."""
    factors, scales = map(torch.tensor, candidates.bias)
    return factors[:, :, None] * symbols(candidates)[:, None] * scales[..., None]


@pytest.mark.parametrize("num_candidates", [1, 5, V, 99])
@pytest.mark.parametrize("has_blank", [True, False])
def test_candidates_are_the_tokens_most_probable_in_any_frame_with_their_probabilities(
    logits, num_candidates, has_blank
):
    logits = logits if has_blank else logits[..., :V]
    candidates = choose(logits, torch.zeros(A, dtype=torch.long), V, num_candidates)
    assert candidates.tokens.shape == (A, min(num_candidates, V)) and candidates.bias is None
    for tokens, probs, distribution in zip(candidates.tokens, symbols(candidates), logits.softmax(-1), strict=True):
        highest = distribution[:, :V].amax(0).argsort(descending=True)
        assert set(tokens) == set(highest[:num_candidates].tolist()) and len(set(tokens)) == len(tokens)
        torch.testing.assert_close(probs, distribution[:, [*tokens.tolist(), V][: len(tokens) + has_blank]])


@pytest.mark.parametrize("num_candidates", [4, 99])
def test_with_a_bias_row_l_is_the_distribution_after_candidate_l_and_the_last_row_after_the_root(
    logits, markov, num_candidates
):
    roots = torch.tensor([2, 7, 0])
    candidates = choose(logits, roots, V, num_candidates, markov)
    for tokens, root, frames, probs in zip(candidates.tokens, roots, logits, distributions(candidates), strict=True):
        before = torch.cat([torch.tensor(tokens), root[None]])
        expected = (frames + markov(before)[:, None]).softmax(-1)  # (C + 1, T, V + 1)
        torch.testing.assert_close(probs, expected[..., [*tokens.tolist(), V]])


def test_distributions_with_a_bias_are_the_same_under_autocast(logits, markov):
    """Validation in mixed precision uses the same distribution as decoding."""
    logits, markov, roots = logits.float(), markov.float(), torch.tensor([2, 7, 0])
    plain = choose(logits, roots, V, 4, markov)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = choose(logits, roots, V, 4, markov)
    assert (plain.tokens == mixed.tokens).all() and torch.equal(distributions(plain), distributions(mixed))


@pytest.mark.parametrize("num_drafts", [1, 8, 33])
@pytest.mark.parametrize(("with_bias", "is_short"), [(False, False), (True, False), (True, True)])
def test_each_draft_of_a_batch_has_the_candidates_that_it_has_alone(
    markov, num_drafts, with_bias, is_short, monkeypatch
):
    if is_short:
        monkeypatch.setattr(module, "NUM_LIKELY", 7)
        monkeypatch.setattr(module, "NUM_LISTED", 5)
    generator = torch.Generator().manual_seed(num_drafts)
    logits = torch.randn(num_drafts, T, V + 1, generator=generator, dtype=torch.float64)
    roots, bias = torch.randint(V, (num_drafts,), generator=generator), markov if with_bias else None
    together = choose(logits, roots, V, 4, bias)
    for draft in range(num_drafts):
        here = slice(draft, draft + 1)
        alone = choose(logits[here], roots[here], V, 4, bias)
        assert (together.tokens[here] == alone.tokens).all()
        for part in (symbols, distributions)[: 1 + with_bias]:
            np.testing.assert_allclose(part(together)[here], part(alone), rtol=1e-12)


def test_distributions_that_exclude_each_other_give_no_tree_and_no_error():
    """A frame may be sure of a token that the bias rules out; nothing is divided by zero."""
    logits = torch.full((1, 2, V + 1), -1000.0)
    logits[0, :, 3] = 0.0
    markov = Markov(V, 1, V + 1).requires_grad_(False)
    markov.left.fill_(1.0)
    markov.right[3] = -1000.0
    (tree,) = search(choose(logits, torch.tensor([0]), V, 4, markov), SearchLimits(9, 2))
    assert len(tree) == 0


@pytest.mark.parametrize("num_symbols", [V, V + 1], ids=["block", "ctc"])
def test_of_a_large_vocabulary_the_unlikely_tokens_count_as_one_symbol_without_a_bias(
    logits, markov, num_symbols, monkeypatch
):
    monkeypatch.setattr(module, "NUM_LIKELY", 5)
    monkeypatch.setattr(module, "NUM_LISTED", 3)
    roots = torch.tensor([2, 7, 0])
    logits = logits[..., :num_symbols]
    markov.right = torch.nn.Parameter(markov.right[:num_symbols], requires_grad=False)
    candidates = choose(logits, roots, V, 3, markov)
    for tokens, root, frames, probs in zip(candidates.tokens, roots, logits, distributions(candidates), strict=True):
        before, columns = torch.cat([torch.tensor(tokens), root[None]]), [*tokens.tolist(), V][: 3 + (num_symbols > V)]
        unlikely = frames.softmax(-1)[:, :V].amax(0).argsort()[: V - 5]
        assert not set(tokens) & set(unlikely.tolist())
        bias = markov(before)
        bias[:, unlikely] = 0
        raised = frames.softmax(-1)[None] * bias.exp()[:, None]  # (C + 1, T, W)
        torch.testing.assert_close(probs, raised[..., columns] / raised.sum(-1, keepdim=True))


def test_a_short_list_has_the_likely_tokens_and_the_likely_successors_of_the_root_and_of_these(monkeypatch):
    monkeypatch.setattr(module, "NUM_BEFORE", 2)
    frames = torch.tensor([[[9.0, 8.0, 7.0, 6.0, 1.0, 1.0, 1.0, 1.0, 0.0]]]).log_softmax(-1)
    left, right = torch.eye(V), torch.zeros(V, V)
    for before, after in ((8, 5), (1, 6), (2, 7), (0, 4)):  # only two tokens and the root, 8, may come before
        right[after, before] = 50.0
    symbols = Symbols(frames, torch.arange(8)[None], left, right[None])
    assert set(module.short_list(symbols, torch.tensor([8]), 5)[0].tolist()) == {5, 6, 4, 0, 1}
