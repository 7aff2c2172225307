"""Candidates and their probabilities, against the softmax over the full vocabulary."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

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


# ---- the choice with a bias


def expected_frames(logits, roots, markov):
    """(A, V) the expected frames of all tokens; the rest is impossible."""
    log_probs = pad(logits.log_softmax(-1), (0, 1), value=-torch.inf)
    tokens = torch.cat([torch.arange(V).expand(len(roots), -1), roots[:, None]], 1)
    right = pad(markov.right, (0, 0, 0, 1)).expand(len(roots), -1, -1)
    return module.expected_frames(Symbols(log_probs, tokens, markov.left, right, logits.shape[-1] > V))


def literal_expected_frames(frames, root, markov, num_last):
    """(V,) the same for one draft, symbol by symbol: p_t(v | l) for the root and the most probable last tokens l."""
    expected, probability = (
        torch.zeros(V, dtype=torch.float64),
        Counter({None: 1.0}),
    )  # None: only blanks below the root
    for frame in frames:
        most_probable = sorted(set(probability) - {None}, key=probability.get)[-num_last:]
        following = Counter()
        for last in [None, *most_probable]:
            distribution = (frame + markov(root if last is None else torch.tensor(last))).softmax(-1)
            for symbol, p in enumerate(distribution.tolist()):
                following[last if symbol == V else symbol] += probability[last] * p
                if symbol < V:
                    expected[symbol] += probability[last] * p
        probability = following
    return expected


def expected_frames_of_all_sequences(frames, root, markov):
    """(V,) the same with every last token: the sum over all sequences of symbols."""
    expected = torch.zeros(V, dtype=torch.float64)
    for sequence in product(range(frames.shape[1]), repeat=len(frames)):
        last, probability = root, 1.0
        for frame, symbol in zip(frames, sequence, strict=True):
            probability *= (frame + markov(last)).softmax(-1)[symbol].item()
            last = last if symbol == V else torch.tensor(symbol)
        for symbol in sequence:
            if symbol < V:
                expected[symbol] += probability
    return expected


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_last", [1, 3, V])
@pytest.mark.parametrize("num_symbols", [V, V + 1], ids=["block", "ctc"])
def test_the_expected_frames_are_those_of_the_plain_sum(logits, markov, num_symbols, num_last, has_bias, monkeypatch):
    monkeypatch.setattr(module, "NUM_LAST", num_last)
    logits, roots = logits[:, :, :num_symbols], torch.tensor([5, 2, 5])
    markov.right = torch.nn.Parameter(markov.right[:num_symbols] * has_bias, requires_grad=False)
    for expected, frames, root in zip(expected_frames(logits, roots, markov), logits, roots, strict=True):
        torch.testing.assert_close(expected, literal_expected_frames(frames, root, markov, num_last))
    if num_last == V:
        two = expected_frames(logits[:1, :2], roots[:1], markov)[0]
        torch.testing.assert_close(two, expected_frames_of_all_sequences(logits[0, :2], roots[0], markov))
        if not has_bias:
            torch.testing.assert_close(expected, frames.softmax(-1)[:, :V].sum(0))


def test_no_node_is_more_probable_than_its_token_is_expected(logits, markov, monkeypatch):
    """So whatever is more probable than the least expected candidate is made of candidates."""
    monkeypatch.setattr(module, "NUM_LAST", V)
    roots = torch.full((A,), 4)
    trees = search(choose(logits, roots, V, V, markov), SearchLimits(500, T))
    for tree, expected in zip(trees, expected_frames(logits, roots, markov), strict=True):
        assert all(expected[token] >= p - 1e-12 for token, p in zip(tree.tokens, tree.probabilities, strict=True))


@pytest.mark.parametrize("has_blank", [True, False], ids=["ctc", "block"])
def test_few_candidates_make_almost_the_tree_of_all_tokens(has_blank):
    """Although each token is likely only after the one before it, in no frame by itself."""
    num_tokens, num_drafts, num_frames = 200, 8, 6
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_drafts, num_frames, num_tokens + has_blank, generator=generator)
    markov = Markov(num_tokens, num_tokens, num_tokens + has_blank).requires_grad_(False)
    markov.left.copy_(torch.eye(num_tokens))
    followers = torch.randperm(num_tokens, generator=generator)
    markov.right[followers, torch.arange(num_tokens)] = 8.0
    roots, limits = torch.arange(num_drafts), SearchLimits(16, num_frames)
    few, every = (
        sum(sum(tree.probabilities) for tree in search(choose(logits, roots, num_tokens, number, markov), limits))
        for number in (24, num_tokens)
    )
    assert 0.98 * every < few <= every
    assert every > 2 * num_drafts  # the second successors are as good as sure
