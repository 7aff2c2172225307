"""CTC prefix search against the prefixes of every alignment, enumerated."""

from collections import defaultdict
from itertools import product

import numpy as np
import pytest

from drafters.learned.ctc.prefix import search

TOKENS = np.array([11, 12, 13])
SHAPES = [(1, 1), (3, 3), (4, 3), (5, 2), (6, 2)]  # frames, candidate tokens


def random_frames(num_frames, num_tokens, seed=0, unheld=0.0):
    """Token and blank probabilities, with a share of each frame left to tokens that are no candidates."""
    logits = np.random.default_rng(seed).normal(size=(num_frames, num_tokens + 1)) * 1.5
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True) * (1 - unheld)
    return probs[:, :-1], probs[:, -1], TOKENS[:num_tokens]


def enumerated(probs, blank, tokens):
    """Probability of every prefix: the sum over the alignments whose collapsed text begins with it."""
    columns = np.column_stack([probs, blank])
    found = defaultdict(float)
    for alignment in product(range(len(tokens) + 1), repeat=len(probs)):
        text, last = [], len(tokens)
        for symbol in alignment:
            if symbol not in (last, len(tokens)):
                text.append(int(tokens[symbol]))
            last = symbol
        probability = columns[range(len(probs)), alignment].prod()
        for length in range(1, len(text) + 1):
            found[tuple(text[:length])] += probability
    return found


def by_path(tree, probs):
    tree.validate(vocab_size=100)
    paths = {tuple(tree.path_tokens(node)): probs[node] for node in range(len(tree))}
    assert len(paths) == len(tree), "two nodes spell one text"
    return paths


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert np.allclose([found[path] for path in expected], list(expected.values()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_nodes", [0, 1, 2, 5, 12, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_the_tree_holds_the_most_probable_prefixes(shape, num_nodes, seed):
    frames = random_frames(*shape, seed)
    every = enumerated(*frames)
    best = dict(sorted(every.items(), key=lambda pair: -pair[1])[:num_nodes])
    assert_same(by_path(*search(*frames, num_nodes, max_depth=shape[0])), best)


def test_mass_outside_the_candidates_is_lost_to_prefixes_that_need_it():
    """A frame may hold a token that is no candidate; enumerate it as a token of its own and leave it out."""
    probs, blank, tokens = random_frames(4, 2, unheld=0.3)
    other = np.full((4, 1), 0.3)
    every = enumerated(np.hstack([probs, other]), blank, np.append(tokens, 99))
    expected = {path: p for path, p in every.items() if 99 not in path}
    assert_same(by_path(*search(probs, blank, tokens, 1000, max_depth=4)), expected)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_the_budget_goes_to_nodes_within_the_depth_limit(depth):
    frames = random_frames(5, 3)
    allowed = {path: p for path, p in enumerated(*frames).items() if len(path) <= depth}
    best = dict(sorted(allowed.items(), key=lambda pair: -pair[1])[:10])
    assert_same(by_path(*search(*frames, 10, depth)), best)


@pytest.mark.parametrize("num_nodes", [4, 9, 1000])
def test_nothing_stands_below_an_end_token(num_nodes):
    frames = random_frames(5, 3)
    allowed = {path: p for path, p in enumerated(*frames).items() if 12 not in path[:-1]}
    best = dict(sorted(allowed.items(), key=lambda pair: -pair[1])[:num_nodes])
    assert_same(by_path(*search(*frames, num_nodes, 5, eos={12})), best)


@pytest.mark.parametrize("floor", [0.01, 0.1, 0.5, 1.1])
def test_improbable_prefixes_are_left_out(floor):
    frames = random_frames(5, 3)
    expected = {path: p for path, p in enumerated(*frames).items() if p >= floor}
    assert_same(by_path(*search(*frames, 1000, 5, min_probability=floor)), expected)


@pytest.mark.parametrize("seed", range(5))
def test_a_node_is_no_more_probable_than_its_parent(seed):
    tree, probs = search(*random_frames(6, 3, seed), 40, 6)
    assert all(parent == -1 or probs[node] <= probs[parent] for node, parent in enumerate(tree.parents))
    assert all(0 < p <= 1 for p in probs)


def test_a_repeated_token_needs_a_blank_between():
    sure = np.array([[1.0], [0.0], [1.0]])
    assert by_path(*search(sure, np.array([0.0, 1.0, 0.0]), TOKENS[:1], 9, 3)) == {(11,): 1.0, (11, 11): 1.0}
    assert by_path(*search(np.ones((3, 1)), np.zeros(3), TOKENS[:1], 9, 3)) == {(11,): 1.0}


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 5])
@pytest.mark.parametrize("scale", [1, 8, 30])
def test_rounding_lifts_no_child_above_its_parent(num_nodes, scale):
    """Frames in float32 sum to a little more than one; a child that looks likelier than its parent must not oust it."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        logits = (rng.normal(size=(8, 4)) * scale).astype(np.float32)
        probs = np.exp(logits - logits.max(1, keepdims=True))
        probs /= probs.sum(1, keepdims=True)
        tree, _ = search(probs[:, :3], probs[:, 3], TOKENS, num_nodes, 8)
        tree.validate(vocab_size=100)
        assert 0 < len(tree) <= num_nodes
