"""Best-first search, against a list of all paths and of all alignments."""

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.ctc.trees import prefix_distributions
from drafters.trees.search import Bias, Candidates, SearchLimits, search
from tests.conftest import check_tree

TOKENS = np.array([11, 12, 13])
each_kind = pytest.mark.parametrize(
    ("kind", "biased"), [("ctc", False), ("ctc", True), ("plain", False), ("plain", True), ("own", False)]
)


class Draft:
    """One draft's candidates with a share of other tokens, and the literal probability of each of its paths.

    Args:
        literal_texts: The literal texts of CTC frames.
        kind: CTC frames, or frames that show one token each (plain), perhaps with own candidates in each frame (own).
        shape: Frames and candidate tokens.
        biased: Whether there is a bias between neighbouring tokens.
        held: The candidates' share of each frame's probability.
    """

    def __init__(self, literal_texts, kind, shape=(5, 3), biased=False, seed=0, held=1.0):
        (num_frames, num_tokens), rng = shape, np.random.default_rng(seed)
        is_ctc = kind == "ctc"
        symbols = np.exp(rng.normal(size=(num_frames, num_tokens + is_ctc)) * 1.5)
        symbols /= symbols.sum(1, keepdims=True) / held
        tokens = np.stack([rng.permutation(9)[:num_tokens] for _ in symbols]) if kind == "own" else TOKENS[:num_tokens]
        bias, table = None, np.repeat(symbols[:, None], num_tokens + 1, 1)  # (T, C + 1, C [+ 1]), the root's row last
        if biased:
            factors = np.exp(rng.normal(size=(num_tokens + 1, symbols.shape[1])))
            bias = Bias(factors, 1 / (factors @ symbols.T))
            table = symbols[:, None] * factors * bias.scales.T[..., None]
            bias = Bias(*(part[None] for part in bias))
        blank = symbols[None, :, -1] if is_ctc else None
        self.candidates = Candidates(tokens[None], symbols[None, :, :num_tokens], blank, bias)
        if is_ctc:
            texts = literal_texts(torch.from_numpy(table), num_tokens).every()
            self.every = {tuple(int(tokens[c]) for c in text): p for text, p in texts.items() if text and p > 0}
        else:
            self.every, rows = {}, np.broadcast_to(tokens, (num_frames, num_tokens))
            for depth in range(1, num_frames + 1):
                for path in product(range(num_tokens), repeat=depth):
                    above = [num_tokens, *path[:-1]]
                    probability = np.prod([table[t, above[t], c] for t, c in enumerate(path)])
                    self.every[tuple(int(rows[t, c]) for t, c in enumerate(path))] = float(probability)

    def search(self, *limits, **more):
        tree = search(self.candidates, SearchLimits(*limits, **more))[0]
        check_tree(tree, 100)
        assert (np.diff(tree.probabilities) <= 0).all()
        paths = {tuple(tree.path_tokens(node)): p for node, p in enumerate(tree.probabilities)}
        assert len(paths) == len(tree), "two nodes have the same text"
        return paths

    def best(self, num_nodes, allowed=lambda path: True):
        every = [pair for pair in self.every.items() if allowed(pair[0])]
        return dict(sorted(every, key=lambda pair: -pair[1])[:num_nodes])


@each_kind
@pytest.mark.parametrize("shape", [(1, 1), (4, 3), (6, 2)])
@pytest.mark.parametrize("seed", range(2))
def test_the_tree_has_the_most_probable_paths(literal_texts, kind, shape, biased, seed):
    draft = Draft(literal_texts, kind, shape, biased, seed)
    assert shape[0] < 3 or kind == "own" or any(a == b for path in draft.every for a, b in pairwise(path))
    for num_nodes in (0, 1, 2, 5, 12, 2000):
        assert draft.search(num_nodes, 9) == pytest.approx(draft.best(num_nodes), abs=1e-12)


@pytest.mark.parametrize("kind", ["ctc", "plain", "own"])
def test_limits_leave_out_what_is_beyond_them(literal_texts, kind):
    """And nodes within them take its place."""
    draft = Draft(literal_texts, kind)
    end = next(iter(draft.best(1)))[0]
    for depth in range(4):
        assert draft.search(10, depth) == pytest.approx(draft.best(10, lambda path, d=depth: len(path) <= d))
    for num_nodes in (4, 9, 2000):
        expected = draft.best(num_nodes, lambda path: end not in path[:-1])
        assert draft.search(num_nodes, 5, {end}) == pytest.approx(expected)
    for floor in (0.01, 0.1, 0.5, 1.1):
        expected = {path: p for path, p in draft.best(2000).items() if p >= floor}
        assert draft.search(2000, 5, min_probability=floor) == pytest.approx(expected)


@each_kind
@pytest.mark.parametrize("seed", range(3))
def test_a_chain_continues_with_the_most_probable_child(literal_texts, kind, biased, seed):
    draft, path, chain = Draft(literal_texts, kind, (5, 3), biased, seed), (), {}
    while children := [child for child in draft.every if child[:-1] == path]:
        path = max(children, key=draft.every.get)
        chain[path] = draft.every[path]
    nodes = draft.search(99, 99, is_chain=True)
    assert nodes == pytest.approx(chain)
    paths = list(nodes)
    assert list(draft.search(2, 99, is_chain=True)) == list(draft.search(99, 2, is_chain=True)) == paths[:2]
    assert list(draft.search(99, 99, min_probability=nodes[paths[1]], is_chain=True)) == paths[:2]
    assert list(draft.search(99, 99, {path[1]}, is_chain=True)) == paths[: path.index(path[1]) + 1]


def test_probability_outside_the_candidates_is_left_out(literal_texts):
    """A frame may emit a token that is no candidate; then the text is that of no node."""
    whole = Draft(literal_texts, "ctc", (4, 3))
    kept = whole.candidates._replace(tokens=TOKENS[None, :2], probs=whole.candidates.probs[..., :2])
    (tree,) = search(kept, SearchLimits(999, 9))
    probabilities = {tuple(tree.path_tokens(node)): p for node, p in enumerate(tree.probabilities)}
    assert probabilities == pytest.approx(whole.best(999, lambda path: 13 not in path))


@pytest.mark.parametrize("num_nodes", [1, 3])
@pytest.mark.parametrize("scale", [1, 30])
def test_rounding_never_puts_a_child_before_its_parent(num_nodes, scale):
    """Float32 frames may sum to just above one; a child that seems likelier than its parent must not replace it."""
    logits = (np.random.default_rng(0).normal(size=(100, 8, 4)) * scale).astype(np.float32)
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    tokens = np.tile(TOKENS, (100, 1))
    for blank in (probs[..., 3], None):
        for tree in search(Candidates(tokens, probs[..., :3], blank), SearchLimits(num_nodes, 8)):
            check_tree(tree, 100)
            assert 0 < len(tree) <= num_nodes


@pytest.mark.parametrize("num_frames, num_tokens", [(0, 2), (3, 0), (0, 0)])
@pytest.mark.parametrize("has_blank", [True, False])
def test_no_frames_or_no_candidates_give_no_tree(num_frames, num_tokens, has_blank):
    blank = np.ones((1, num_frames)) if has_blank else None
    nothing = Candidates(np.arange(num_tokens)[None], np.zeros((1, num_frames, num_tokens)), blank)
    assert len(search(nothing, SearchLimits(5, 5))[0]) == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_large_search_has_the_probabilities_of_the_reference_and_misses_nothing_more_probable(seed):
    generator = torch.Generator().manual_seed(seed)
    logits, table = (3 * torch.randn(n, 41, generator=generator, dtype=torch.float64) for n in (12, 41))
    frames, factors = logits.softmax(-1), table.softmax(-1)
    bias = Bias(factors[None].numpy(), 1 / (factors @ frames.T)[None].numpy())
    candidates = Candidates(np.arange(40)[None], frames[None, :, :-1].numpy(), frames[None, :, -1].numpy(), bias)
    (tree,) = search(candidates, SearchLimits(64, 12))
    paths = [(), *(tuple(tree.path_tokens(node)) for node in range(64))]
    tokens = torch.tensor([path[-1] if path else 40 for path in paths])  # row 40 of the table is the root's
    parents = torch.tensor([-1, *(parent + 1 for parent in tree.parents)])
    prefix, next_token = prefix_distributions(logits, tokens, parents, table[tokens])
    np.testing.assert_allclose(tree.probabilities, prefix[1:].numpy(), rtol=1e-9)
    children = next_token * prefix[:, None]
    for parent, token in zip(parents[1:], tokens[1:], strict=True):
        children[parent, token] = 0.0
    assert float(children.max()) <= tree.probabilities[-1]


def test_equally_probable_paths_come_in_the_order_of_the_candidates():
    even = Candidates(np.array([[13, 11, 12]]), np.full((1, 2, 3), 0.25), np.full((1, 2), 0.25))
    (tree,) = search(even, SearchLimits(3, 2))
    assert tree.tokens == [13, 11, 12] and tree.parents == [-1, -1, -1]
    assert {type(number) for number in [*tree.tokens, *tree.parents]} == {int}


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_batch_finds_for_each_draft_what_its_own_search_finds(data):
    num_drafts, seed = data.draw(st.integers(1, 33)), data.draw(st.integers(0, 10**6))
    is_ctc, with_bias, own_rows = (data.draw(st.booleans()) for _ in range(3))
    rng, (num_frames, num_tokens) = np.random.default_rng(seed), (5, 6)
    frames = np.exp(rng.normal(size=(num_drafts, num_frames, num_tokens + 1)) * rng.uniform(0, 6, (num_drafts, 1, 1)))
    frames /= frames.sum(-1, keepdims=True)
    tokens = rng.permuted(np.tile(np.arange(10), (num_drafts, num_frames, 1)), axis=2)[..., :num_tokens]
    tokens = tokens if own_rows and not is_ctc else tokens[:, 0]
    factors = np.exp(rng.normal(size=(num_drafts, num_tokens + 1, num_tokens + is_ctc)))
    bias = Bias(factors, rng.random((num_drafts, num_tokens + 1, num_frames))) if with_bias else None
    blank = frames[..., -1] if is_ctc else None
    given_limits = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 6)), {3, 4}, data.draw(st.floats(0, 0.2))
    limits = SearchLimits(*given_limits, data.draw(st.booleans()))
    trees = search(Candidates(tokens, frames[..., :-1], blank, bias), limits)
    assert len(trees) == num_drafts
    for draft, tree in enumerate(trees):
        here = slice(draft, draft + 1)
        own_bias = bias and Bias(*(part[here] for part in bias))
        own_blank = None if blank is None else blank[here]
        (alone,) = search(Candidates(tokens[here], frames[here, :, :-1], own_blank, own_bias), limits)
        assert tree == alone and tree.probabilities == alone.probabilities
