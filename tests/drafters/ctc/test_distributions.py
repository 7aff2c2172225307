"""The distribution of CTC texts and samples from it, against an enumeration of every alignment."""

from collections import defaultdict
from itertools import product

import numpy as np
import pytest
import torch

from drafters.ctc.distributions import FrameDistributions, next_token_distribution, spell, stop_probability
from drafters.ctc.sampled_tree import draw, merge, sample_alignments
from drafters.tree import ROOT

V, BLANK, START = 3, 3, 1  # tokens 0, 1, 2; the root is token 1
NUM_FRAMES = [1, 2, 4, 5]
each_bias = pytest.mark.parametrize("biased", [False, True], ids=["without bias", "with bias"])


def random_frames(num_frames, biased, seed=0, scale=1.5):
    """Return logits (T, V + 1), and biases (V, V + 1) or None."""
    generator = torch.Generator().manual_seed(seed)
    logits, table = (torch.randn(n, V + 1, generator=generator, dtype=torch.float64) for n in (num_frames, V))
    return logits * scale, table * scale if biased else None


def every_alignment(logits, table):
    """Return the symbols, text and probability of each alignment, computed frame by frame."""
    for symbols in product(range(V + 1), repeat=len(logits)):
        text, last, before, probability = [], START, BLANK, 1.0
        for frame, symbol in zip(logits, symbols, strict=True):
            distribution = (frame if table is None else frame + table[last]).softmax(-1)
            probability *= distribution[symbol].item()
            if symbol not in (before, BLANK):
                text.append(symbol)
                last = symbol
            before = symbol
        yield symbols, tuple(text), probability


def enumerated(logits, table):
    """Return P(the text is g) and P(the text begins with g) for every text g of some alignment."""
    is_text, begins = defaultdict(float), defaultdict(float)
    for _, text, probability in every_alignment(logits, table):
        is_text[text] += probability
        for length in range(len(text) + 1):
            begins[text[:length]] += probability
    return is_text, begins


def distributions_of(texts, logits, table):
    """`Prefixes` and next-token distributions of a prefix-closed set of texts, the empty one first."""
    tokens = torch.tensor([text[-1] if text else START for text in texts])
    parents = torch.tensor([texts.index(text[:-1]) if text else -1 for text in texts])
    frames = FrameDistributions(logits, None if table is None else table[tokens])
    prefixes = spell(frames, tokens, parents)
    return prefixes, next_token_distribution(frames, prefixes)


@each_bias
@pytest.mark.parametrize("num_frames", NUM_FRAMES)
@pytest.mark.parametrize("scale", [1.5, 8.0])
def test_the_distribution_of_the_next_token_sums_over_every_alignment(num_frames, biased, scale):
    logits, table = random_frames(num_frames, biased, scale=scale)
    is_text, begins = enumerated(logits, table)
    texts = sorted(begins, key=len)
    assert num_frames < 3 or (START, START) in texts
    prefixes, distribution = distributions_of(texts, logits, table)
    every = torch.tensor([begins[text] for text in texts], dtype=torch.float64)
    after = torch.tensor([[begins.get((*text, token), 0.0) for token in range(V)] for text in texts]).to(every)
    stops = torch.tensor([is_text.get(text, 0.0) for text in texts]).to(every)
    torch.testing.assert_close(prefixes.probs, every, rtol=1e-12, atol=0)
    torch.testing.assert_close(distribution, after / every[:, None], rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(stop_probability(prefixes), stops / every, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(stop_probability(prefixes), 1 - distribution.sum(-1), rtol=0, atol=1e-12)


@each_bias
def test_the_order_of_the_prefixes_does_not_matter(biased):
    logits, table = random_frames(4, biased)
    texts = sorted(enumerated(logits, table)[1], key=len)
    backwards = [(), *texts[:0:-1]]
    _, distribution = distributions_of(texts, logits, table)
    _, again = distributions_of(backwards, logits, table)
    torch.testing.assert_close(again, distribution[[texts.index(text) for text in backwards]], rtol=0, atol=1e-14)


def test_a_bias_that_is_the_same_for_every_token_is_a_shift_of_the_logits():
    logits, table = random_frames(4, True)
    same = table[:1].expand(V, -1)
    texts = [(), (1,), (1, 1), (0,), (0, 2)]
    _, distribution = distributions_of(texts, logits, same)
    _, shifted = distributions_of(texts, logits + same[0], None)
    torch.testing.assert_close(distribution, shifted, rtol=0, atol=1e-12)


# ---- sampling


class Scripted:
    """A generator that returns given numbers (T, N)."""

    def __init__(self, numbers):
        self.numbers = np.asarray(numbers)

    def random(self, shape):
        assert self.numbers.shape == shape
        return self.numbers


def looked_up(table):
    return None if table is None else lambda tokens: table[tokens]


def intervals(logits, table, symbols):
    """Return the interval of random numbers that samples each symbol of an alignment, and the intervals' product."""
    last, lows, highs = START, [], []
    for frame, symbol in zip(logits, symbols, strict=True):
        edges = [0.0, *(frame if table is None else frame + table[last]).softmax(-1).cumsum(-1).tolist()]
        lows.append(edges[symbol])
        highs.append(edges[symbol + 1])
        last = last if symbol == BLANK else symbol
    return np.array(lows), np.array(highs), np.prod(np.array(highs) - np.array(lows))


@each_bias
def test_the_share_of_random_numbers_that_sample_an_alignment_is_its_probability(biased):
    logits, table = random_frames(3, biased)
    for symbols, _, probability in every_alignment(logits, table):
        low, high, share = intervals(logits, table, symbols)
        assert share == pytest.approx(probability, abs=1e-12)
        inside = torch.from_numpy(np.stack([low + 1e-9, (low + high) / 2, high - 1e-9], axis=1))
        drawn = sample_alignments(logits, looked_up(table), START, inside)
        assert drawn.tolist() == [list(symbols)] * 3


@each_bias
def test_a_sampled_tree_merges_the_texts_and_has_the_distribution_of_every_inner_node(biased):
    logits, table = random_frames(4, biased)
    is_text, begins = enumerated(logits, table)
    spelled = {text: symbols for symbols, text, _ in every_alignment(logits, table)}
    for texts in [
        [(1, 1), (1, 2), (1, 1)],
        [(0, 1, 0), (), (0, 2)],
        [(2,), (2,), (2, 0, 2, 0)],
    ]:
        numbers = np.stack([sum(intervals(logits, table, spelled[text])[:2]) / 2 for text in texts], axis=1)
        tree = draw(logits, looked_up(table), START, 3, 99, 99, (), Scripted(numbers))
        tree.validate(V)
        assert {tuple(tree.path_tokens(node)) for node in range(len(tree))} == {
            text[:length] for text in texts for length in range(1, len(text) + 1)
        }
        assert len({distribution.parent for distribution in tree.distributions}) == len(tree.distributions)
        for distribution in tree.distributions:
            prefix = tuple(tree.path_tokens(distribution.parent))
            drawn = [text[len(prefix)] for text in texts if text[: len(prefix)] == prefix and len(text) > len(prefix)]
            assert [tree.tokens[node] for node in distribution.draws] == drawn
            assert distribution.replacement
            goes_on = begins[prefix] - is_text[prefix]
            expected = torch.tensor([begins.get((*prefix, token), 0.0) / goes_on for token in range(V)]).double()
            torch.testing.assert_close(distribution.probs, expected, rtol=0, atol=1e-7)
        assert {node for distribution in tree.distributions for node in distribution.draws} == set(range(len(tree)))


@each_bias
def test_many_sampled_texts_follow_the_distribution(biased):
    logits, table = random_frames(4, biased, seed=2)
    uniforms = torch.from_numpy(np.random.default_rng(0).random((4, 20_000)))
    drawn = sample_alignments(logits, looked_up(table), START, uniforms).tolist()
    counts = defaultdict(int)
    for symbols in drawn:
        counts[tuple(symbols)] += 1
    expected = {symbols: probability * 20_000 for symbols, _, probability in every_alignment(logits, table)}
    often = [symbols for symbols in expected if expected[symbols] >= 5]
    chi_square = sum((counts[symbols] - expected[symbols]) ** 2 / expected[symbols] for symbols in often)
    freedom = len(often)
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


@each_bias
def test_a_temperature_divides_logits_and_biases(biased):
    logits, table = random_frames(4, biased)
    cooled = None if table is None else table / 0.5
    ours = draw(logits, looked_up(table), START, 6, 99, 99, (), np.random.default_rng(3), temperature=0.5)
    same = draw(logits / 0.5, looked_up(cooled), START, 6, 99, 99, (), np.random.default_rng(3))
    assert (ours.tokens, ours.parents) == (same.tokens, same.parents)
    for one, two in zip(ours.distributions, same.distributions, strict=True):
        torch.testing.assert_close(one.probs, two.probs)


def test_texts_without_tokens_give_an_empty_tree():
    logits = torch.tensor([[0.0, 0.0, 0.0, 60.0]] * 4)
    tree = draw(logits, None, START, 8, 99, 99, (), np.random.default_rng(0))
    assert len(tree) == 0 and tree.distributions == ()


@pytest.mark.parametrize(("max_nodes", "max_depth"), [(0, 9), (9, 0), (-1, 9), (9, -1)])
def test_limits_below_one_give_an_empty_tree(max_nodes, max_depth):
    assert (
        draw(torch.zeros(4, 4), None, START, 3, max_nodes, max_depth, (), np.random.default_rng(0)).distributions == ()
    )


def test_the_same_seed_samples_the_same_tree():
    logits, _ = random_frames(5, False)
    one, two = (draw(logits, None, START, 4, 99, 99, (), np.random.default_rng(5)) for _ in range(2))
    assert (one.tokens, one.parents) == (two.tokens, two.parents)


@pytest.mark.parametrize(("num_texts", "temperature"), [(0, 1.0), (2, 0.0), (2, -1.0), (2, float("nan"))])
def test_invalid_settings_are_refused(num_texts, temperature):
    with pytest.raises(ValueError, match="num_texts >= 1"):
        draw(torch.zeros(4, 4), None, START, num_texts, 9, 9, (), np.random.default_rng(0), temperature)


# ---- limits


def test_a_full_tree_takes_no_more_samples_not_even_repeated_ones():
    texts = [[5, 6], [5, 7], [5, 6]]
    assert merge(texts, 9, 9, ()) == ([5, 6, 7], [ROOT, 0, 0], {ROOT: [0, 0, 0], 0: [1, 2, 1]})
    assert merge(texts, 2, 9, ()) == ([5, 6], [ROOT, 0], {ROOT: [0], 0: [1]})
    assert merge(texts, 3, 9, ()) == ([5, 6, 7], [ROOT, 0, 0], {ROOT: [0, 0], 0: [1, 2]})


def test_the_depth_limit_cuts_by_position():
    assert merge([[5, 6, 7], [5, 8, 7]], 9, 1, ()) == ([5], [ROOT], {ROOT: [0, 0]})


def test_no_node_is_below_an_end_token():
    assert merge([[5, 2, 7], [2, 5]], 9, 9, {2}) == ([5, 2, 2], [ROOT, 0, ROOT], {ROOT: [0, 2], 0: [1]})
