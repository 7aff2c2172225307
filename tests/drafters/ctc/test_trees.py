"""The paper's tree against a literal version, and drawn trees against an enumeration of every alignment."""

from itertools import product

import numpy as np
import pytest
import torch

from drafters import DraftTree
from drafters.ctc.trees import draw, merge, paper_trees, sample_alignments
from drafters.tree import ROOT
from drafters.trees.search import Candidates, SearchLimits
from tests.conftest import check_tree

V, BLANK, START = 3, 3, 1  # tokens 0, 1, 2; the root is token 1
FAR = SearchLimits(99, 99)


# ---- the paper's tree


def random_frames(num_frames, vocab, seed=0):
    """Probabilities (T, V) and blank (T,) of each frame."""
    logits = np.random.default_rng(seed).normal(size=(num_frames, vocab + 1)) * 1.5
    distribution = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return distribution[:, :-1], distribution[:, -1]


def literal(probs, blank, limits):
    """Collapse and merge the most probable frame sequences, as many as fit into a tree of ``num_nodes`` frames."""
    choices = [[*enumerate(row), (None, none)] for row, none in zip(probs, blank, strict=True)]
    sequences = [(np.prod([p for _, p in picks]), [symbol for symbol, _ in picks]) for picks in product(*choices)]
    sequences.sort(key=lambda pair: -pair[0])
    begun = dict.fromkeys(tuple(symbols[:end]) for _, symbols in sequences for end in range(1, len(symbols) + 1))
    texts = []
    for symbols in [*begun][: limits.num_nodes]:
        text, last = [], None
        for symbol in symbols:
            if symbol not in (last, None):
                text.append(symbol)
            last = symbol
        end = next((place for place, token in enumerate(text) if token in limits.eos), len(text))
        if len(text) <= min(limits.max_depth, end + 1):
            texts.append(text)
    return DraftTree.from_paths(texts)


@pytest.mark.parametrize("shape", [(1, 1), (4, 3), (5, 2), (6, 1), (0, 3)])
@pytest.mark.parametrize("num_nodes", [0, 1, 3, 10, 60, 5000])
@pytest.mark.parametrize("max_depth, eos", [(9, ()), (2, ()), (0, ()), (9, {0, 2})])
def test_the_papers_tree_collapses_the_most_probable_frame_sequences(shape, num_nodes, max_depth, eos):
    limits = SearchLimits(num_nodes, max_depth, eos)
    for seed in range(3):
        probs, blank = random_frames(*shape, seed)
        (tree,) = paper_trees(Candidates(np.arange(shape[1])[None], probs[None], blank[None]), limits)
        check_tree(tree, 5)
        assert tree == literal(probs, blank, limits) and len(tree) <= num_nodes


# ---- drawn trees


class Frames:
    """Logits (T, V + 1), a bias table (V, V + 1) or None, and the literal probabilities of their texts."""

    def __init__(self, literal_texts, num_frames, biased, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.logits, table = (
            1.5 * torch.randn(n, V + 1, generator=generator, dtype=torch.float64) for n in (num_frames, V)
        )
        self.table, self.bias = (table, lambda tokens: table[tokens]) if biased else (torch.zeros_like(table), None)
        self.probs = (self.logits[:, None] + self.table).softmax(-1)  # (T, V, V + 1)
        self.texts = literal_texts(self.probs, START)

    def interval(self, symbols):
        """The intervals of random numbers (T,) that sample an alignment."""
        last, lows, highs = START, [], []
        for frame, symbol in zip(self.probs, symbols, strict=True):
            edges = [0.0, *frame[last].cumsum(-1).tolist()]
            lows.append(edges[symbol])
            highs.append(edges[symbol + 1])
            last = last if symbol == BLANK else symbol
        return np.array(lows), np.array(highs)

    def after(self, prefix):
        """The distribution of the next token, given that the text continues."""
        goes_on = self.texts.begins(prefix) - self.texts.whole(prefix)
        return torch.stack([self.texts.begins((*prefix, token)) for token in range(V)]) / goes_on


class Scripted:
    """A generator that returns given numbers (T, N)."""

    def __init__(self, numbers):
        self.numbers = np.asarray(numbers)

    def random(self, shape):
        assert self.numbers.shape == shape
        return self.numbers


each_bias = pytest.mark.parametrize("biased", [False, True], ids=["without bias", "with bias"])


@each_bias
def test_the_share_of_random_numbers_that_sample_an_alignment_is_its_probability(literal_texts, biased):
    frames = Frames(literal_texts, 3, biased)
    for symbols, probability in zip(frames.texts.alignments.tolist(), frames.texts.probabilities.tolist(), strict=True):
        low, high = frames.interval(symbols)
        assert np.prod(high - low) == pytest.approx(probability, abs=1e-12)
        inside = torch.from_numpy(np.stack([low + 1e-9, (low + high) / 2, high - 1e-9], axis=1))
        assert sample_alignments(frames.logits, frames.bias, START, inside).tolist() == [symbols] * 3


@each_bias
@pytest.mark.parametrize("drawn", [[(1, 1), (1, 2), (1, 1)], [(0, 1, 0), (), (0, 2)], [(2,), (2,), (2, 0, 2, 0)]])
def test_a_drawn_tree_merges_the_texts_and_has_the_distribution_of_every_inner_node(literal_texts, biased, drawn):
    frames = Frames(literal_texts, 4, biased)
    spelled = [frames.texts.alignments[frames.texts.whole_of[text][0]].tolist() for text in drawn]
    numbers = np.stack([sum(frames.interval(symbols)) / 2 for symbols in spelled], axis=1)
    tree = draw(frames.logits, START, 3, FAR, Scripted(numbers), frames.bias)
    check_tree(tree, V)
    assert {tuple(tree.path_tokens(node)) for node in range(len(tree))} == {
        text[:length] for text in drawn for length in range(1, len(text) + 1)
    }
    assert len({distribution.parent for distribution in tree.distributions}) == len(tree.distributions)
    for distribution in tree.distributions:
        prefix = tuple(tree.path_tokens(distribution.parent))
        below = [text[len(prefix)] for text in drawn if text[: len(prefix)] == prefix and len(text) > len(prefix)]
        assert [tree.tokens[node] for node in distribution.draws] == below
        torch.testing.assert_close(distribution.probs, frames.after(prefix), rtol=0, atol=1e-7)
    assert {node for distribution in tree.distributions for node in distribution.draws} == set(range(len(tree)))


def test_many_drawn_texts_have_the_distribution_of_every_inner_node(literal_texts):
    frames = Frames(literal_texts, 4, True)
    tree = draw(frames.logits, START, 400, SearchLimits(999, 99), np.random.default_rng(0), frames.bias)
    for distribution in tree.distributions:
        prefix = tuple(tree.path_tokens(distribution.parent))
        torch.testing.assert_close(distribution.probs, frames.after(prefix), rtol=0, atol=1e-10)
    at_root = tree.distributions[0]
    drawn = np.bincount([tree.tokens[node] for node in at_root.draws], minlength=V)
    expected = at_root.probs.numpy() * drawn.sum()
    assert ((drawn - expected) ** 2 / expected).sum() < 15  # chi-squared with two degrees of freedom


@each_bias
def test_a_temperature_divides_logits_and_biases(literal_texts, biased):
    frames = Frames(literal_texts, 4, biased)
    cooled = (lambda tokens: frames.bias(tokens) / 0.5) if biased else None
    tempered = draw(frames.logits, START, 6, FAR, np.random.default_rng(3), frames.bias, temperature=0.5)
    scaled = draw(frames.logits / 0.5, START, 6, FAR, np.random.default_rng(3), cooled)
    assert (tempered.tokens, tempered.parents) == (scaled.tokens, scaled.parents)
    for one, two in zip(tempered.distributions, scaled.distributions, strict=True):
        torch.testing.assert_close(one.probs, two.probs)


def test_texts_without_tokens_and_limits_below_one_give_an_empty_tree():
    sure_of_blanks = torch.tensor([[0.0, 0.0, 0.0, 60.0]] * 4)
    trees = [draw(sure_of_blanks, START, 8, FAR, np.random.default_rng(0))]
    for limits in ((0, 9), (9, 0), (-1, 9), (9, -1)):
        trees.append(draw(torch.zeros(4, 4), START, 3, SearchLimits(*limits), np.random.default_rng(0)))
    assert all(len(tree) == 0 and tree.distributions == () for tree in trees)


@pytest.mark.parametrize(
    ("texts", "limits", "expected"),
    [
        ([[5, 6], [5, 7], [5, 6]], (9, 9), ([5, 6, 7], [ROOT, 0, 0], {ROOT: [0, 0, 0], 0: [1, 2, 1]})),
        # A full tree takes no more samples, not even repeated ones.
        ([[5, 6], [5, 7], [5, 6]], (2, 9), ([5, 6], [ROOT, 0], {ROOT: [0], 0: [1]})),
        ([[5, 6], [5, 7], [5, 6]], (3, 9), ([5, 6, 7], [ROOT, 0, 0], {ROOT: [0, 0], 0: [1, 2]})),
        # The depth limit cuts by position.
        ([[5, 6, 7], [5, 8, 7]], (9, 1), ([5], [ROOT], {ROOT: [0, 0]})),
        # No node is below an end-of-sequence token.
        ([[5, 2, 7], [2, 5]], (9, 9, {2}), ([5, 2, 2], [ROOT, 0, ROOT], {ROOT: [0, 2], 0: [1]})),
    ],
)
def test_a_sample_is_left_out_only_for_what_was_known_before_it_was_drawn(texts, limits, expected):
    tree, draws = merge(texts, SearchLimits(*limits))
    assert (tree.tokens, tree.parents, draws) == expected
