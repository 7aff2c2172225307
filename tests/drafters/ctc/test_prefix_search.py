"""CTC prefix search, against an enumeration of every alignment's prefixes."""

from collections import defaultdict
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.ctc.alignment import prefix_log_probs
from drafters.ctc.prefix_search import chain, search, search_batch
from drafters.trees.best_first import Bias, SearchLimits

TOKENS = np.array([11, 12, 13])
SHAPES = [(1, 1), (3, 3), (4, 3), (5, 2), (6, 2)]  # frames, candidate tokens


def random_frames(num_frames, num_tokens, seed=0, unheld=0.0):
    """Token and blank probabilities; a share of each frame is left for tokens that are not candidates."""
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


def labelled_frames(num_frames, num_tokens, seed=0):
    """Frame probabilities (C + 1, T, C + 1) after each token; the last row is after none, the last column the blank."""
    logits = np.random.default_rng(seed).normal(size=(num_tokens + 1, num_frames, num_tokens + 1)) * 1.5
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def enumerated_with_labels(distributions, tokens):
    """Like `enumerated`, with each frame conditioned on the last token emitted before it."""
    num_tokens, num_frames = len(tokens), distributions.shape[1]
    found, total = defaultdict(float), 0.0
    for alignment in product(range(num_tokens + 1), repeat=num_frames):
        text, last, emitted, probability = [], num_tokens, num_tokens, 1.0
        for frame, symbol in enumerate(alignment):
            probability *= distributions[emitted, frame, symbol]
            if symbol not in (last, num_tokens):
                text.append(int(tokens[symbol]))
                emitted = symbol
            last = symbol
        total += probability
        for length in range(1, len(text) + 1):
            found[tuple(text[:length])] += probability
    assert np.isclose(total, 1.0, atol=1e-12), "the frames are normalised, so the alignments are"
    return found


def by_path(tree, probs):
    tree.validate(vocab_size=100)
    paths = {tuple(tree.path_tokens(node)): probs[node] for node in range(len(tree))}
    assert len(paths) == len(tree), "two nodes have the same text"
    return paths


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert np.allclose([found[path] for path in expected], list(expected.values()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_nodes", [0, 1, 2, 5, 12, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_the_tree_has_the_most_probable_prefixes(shape, num_nodes, seed):
    frames = random_frames(*shape, seed)
    every = enumerated(*frames)
    best = dict(sorted(every.items(), key=lambda pair: -pair[1])[:num_nodes])
    assert_same(by_path(*search(*frames, num_nodes, max_depth=shape[0])), best)


def test_probability_outside_the_candidates_is_left_out():
    """A frame may emit a token that is no candidate; the reference counts it as a token and drops its texts."""
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
def test_no_node_is_below_an_end_token(num_nodes):
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
def test_rounding_never_puts_a_child_before_its_parent(num_nodes, scale):
    """Float32 frames may sum to just above one; a child that seems likelier than its parent must not replace it."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        logits = (rng.normal(size=(8, 4)) * scale).astype(np.float32)
        probs = np.exp(logits - logits.max(1, keepdims=True))
        probs /= probs.sum(1, keepdims=True)
        tree, _ = search(probs[:, :3], probs[:, 3], TOKENS, num_nodes, 8)
        tree.validate(vocab_size=100)
        assert 0 < len(tree) <= num_nodes


@pytest.mark.parametrize("shape", [*SHAPES, (7, 2)])
@pytest.mark.parametrize("num_nodes", [1, 2, 5, 12, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_frames_conditioned_on_the_last_token_give_the_most_probable_prefixes(shape, num_nodes, seed):
    distributions, tokens = labelled_frames(*shape, seed), TOKENS[: shape[1]]
    every = enumerated_with_labels(distributions, tokens)
    assert shape[0] < 3 or any(a == b for path in every for a, b in pairwise(path))
    best = dict(sorted(every.items(), key=lambda pair: -pair[1])[:num_nodes])
    tree, probs = search(distributions[..., :-1], distributions[..., -1], tokens, num_nodes, shape[0])
    assert_same(by_path(tree, probs), best)
    assert all(parent == -1 or probs[node] <= probs[parent] for node, parent in enumerate(tree.parents))
    assert (np.diff(probs) <= 0).all()


@pytest.mark.parametrize("find", [search, chain])
@pytest.mark.parametrize("num_nodes", [3, 12, 1000])
@pytest.mark.parametrize("seed", range(2))
def test_factors_give_the_tree_of_the_table_they_multiply_to(find, num_nodes, seed):
    rng, (num_frames, num_tokens) = np.random.default_rng(seed), (5, 3)
    frames, factors = rng.random((num_frames, num_tokens + 1)), rng.random((num_tokens + 1, num_tokens + 1))
    frames /= frames.sum(-1, keepdims=True)
    bias = Bias(factors, 1 / (factors @ frames.T))
    table = factors[:, None] * frames * bias.scales[..., None]  # (C + 1, T, C + 1)
    tree, probs = find(frames[:, :-1], frames[:, -1], TOKENS, num_nodes, 4, bias=bias)
    other, others = find(table[..., :-1], table[..., -1], TOKENS, num_nodes, 4)
    assert_same(by_path(tree, probs), by_path(other, others))
    every = {path: p for path, p in enumerated_with_labels(table, TOKENS).items() if len(path) <= 4}
    if find is search:
        assert_same(by_path(tree, probs), dict(sorted(every.items(), key=lambda pair: -pair[1])[:num_nodes]))


def test_equal_rows_for_every_token_give_the_result_of_a_single_row():
    probs, blank, tokens = random_frames(6, 3)
    alike = search(np.repeat(probs[None], 4, 0), np.repeat(blank[None], 4, 0), tokens, 30, 6)
    alone = search(probs, blank, tokens, 30, 6)
    assert alike[0] == alone[0] == search(probs[None], blank[None], tokens, 30, 6)[0]
    assert (alike[1] == alone[1]).all()


@pytest.mark.parametrize("rows", [[3], [0, 1, 2, 3]], ids=["one distribution", "labelled"])
@pytest.mark.parametrize("find", [search, chain])
def test_a_duplicate_candidate_counts_once(rows, find):
    distributions = labelled_frames(5, 3)
    places = [1, 0, 1, 2, 0]
    more_rows = rows if len(rows) == 1 else [*places, 3]
    once = find(distributions[rows, :, :-1], distributions[rows, :, -1], TOKENS, 25, 5)
    twice = find(distributions[more_rows][..., places], distributions[more_rows, :, -1], TOKENS[places], 25, 5)
    assert_same(by_path(*twice), by_path(*once))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("depth", [0, 1, 3, 9])
def test_a_chain_continues_with_the_most_probable_child(seed, depth):
    distributions = labelled_frames(6, 3, seed)
    every = enumerated_with_labels(distributions, TOKENS)
    expected, path = {}, ()
    while len(path) < depth:
        children = [child for child in every if child[:-1] == path]
        if not children:  # repeats need blanks between, so six frames may not emit six tokens
            break
        path = max(children, key=every.get)
        expected[path] = every[path]
    assert_same(by_path(*chain(distributions[..., :-1], distributions[..., -1], TOKENS, 100, depth)), expected)
    assert len(chain(distributions[..., :-1], distributions[..., -1], TOKENS, 2, depth)[0]) == min(2, depth)


def test_a_chain_ends_at_an_end_token_and_below_the_smallest_probability():
    frames = random_frames(6, 3)
    tree, probs = chain(*frames, 9, 6)
    assert len(set(tree.tokens)) > 1 and tree.parents == list(range(-1, len(tree) - 1))
    for end in set(tree.tokens):
        cut = tree.tokens[: tree.tokens.index(end) + 1]
        assert chain(*frames, 9, 6, eos=(end,))[0].tokens == cut
    assert len(chain(*frames, 9, 6, min_probability=probs[2])[0]) == 3


@pytest.mark.parametrize("num_frames, num_tokens", [(0, 2), (3, 0), (0, 0)])
def test_no_frames_or_no_candidates_give_no_tree(num_frames, num_tokens):
    nothing = np.zeros((num_frames, num_tokens)), np.ones(num_frames), np.arange(num_tokens)
    tree, probs = search(*nothing, 5, 5)
    assert len(tree) == len(probs) == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("labelled", [False, True])
def test_probabilities_of_a_large_search_equal_those_of_the_loss(labelled, seed):
    """Every node has the probability of the loss, and no omitted child is more probable than the last node."""
    logits = np.random.default_rng(seed).normal(size=(41, 12, 41)) * 3
    logits = logits if labelled else np.repeat(logits[:1], 41, 0)
    distributions = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    tree, found = search(distributions[..., :-1], distributions[..., -1], np.arange(40), 64, 12)
    paths = [tuple(tree.path_tokens(node)) for node in range(64)]
    assert np.allclose(by_recursion(distributions, paths), found, rtol=1e-9)
    children = [(*path, token) for path in [(), *paths] for token in range(40)]
    assert by_recursion(distributions, [path for path in children if path not in paths]).max() <= found[-1]


def by_recursion(distributions, paths):
    """P(text begins with the path), by the recursion of the loss."""
    log_distributions, found = torch.from_numpy(distributions).log(), np.empty(len(paths))
    for length in {len(path) for path in paths}:
        these = [place for place, path in enumerate(paths) if len(path) == length]
        labels = torch.tensor([paths[place] for place in these])  # (A, U)
        last = torch.nn.functional.pad(labels, (1, 0), value=len(distributions) - 1)  # (A, U + 1), first none
        after = log_distributions[last]  # (A, U + 1, T, C + 1)
        emitted = labels[:, :, None].expand(-1, -1, distributions.shape[1])[..., None]
        enter, stay = (
            distribution.gather(-1, emitted)[..., 0].transpose(1, 2) for distribution in (after[:, :-1], after[:, 1:])
        )
        prefix = prefix_log_probs(enter, stay, after[..., -1].transpose(1, 2), labels)[1]
        found[these] = prefix[:, -1].exp().numpy()
    return found


def test_float32_frames_give_the_tree_of_their_float64_values():
    distributions = labelled_frames(6, 3).astype(np.float32)
    single, probs = search(distributions[..., :-1], distributions[..., -1], TOKENS, 40, 6)
    double, expected = search(
        distributions[..., :-1].astype(float), distributions[..., -1].astype(float), TOKENS, 40, 6
    )
    assert single == double and probs.dtype == np.float64
    assert np.allclose(probs, expected, rtol=1e-6)


def test_equally_probable_prefixes_come_in_the_order_of_the_candidates():
    even = np.full((2, 3), 0.25), np.full(2, 0.25), np.array([13, 11, 12])
    tree, _ = search(*even, 3, 2)
    assert tree.tokens == [13, 11, 12] and tree.parents == [-1, -1, -1]
    assert type(tree.tokens) is list and {type(token) for token in [*tree.tokens, *tree.parents]} == {int}


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_batch_finds_for_each_draft_what_its_own_search_finds(data):
    num_drafts, seed = data.draw(st.integers(1, 33)), data.draw(st.integers(0, 10**6))
    with_bias, is_chain = data.draw(st.booleans()), data.draw(st.booleans())
    rng, (num_frames, num_tokens) = np.random.default_rng(seed), (5, 6)
    frames = np.exp(rng.normal(size=(num_drafts, num_frames, num_tokens + 1)) * rng.uniform(0, 6, (num_drafts, 1, 1)))
    frames /= frames.sum(-1, keepdims=True)
    tokens = rng.permuted(np.tile(np.arange(10), (num_drafts, 1)), axis=1)[:, :num_tokens]
    factors = np.exp(rng.normal(size=(num_drafts, num_tokens + 1, num_tokens + 1)))
    bias = Bias(factors, 1 / (factors @ frames.mT)) if with_bias else None
    given_limits = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 6)), {3, 4}, data.draw(st.floats(0, 0.2))
    limits = SearchLimits(*given_limits, is_chain)
    found = search_batch(frames[..., :-1], frames[..., -1], tokens, limits, bias)
    assert len(found) == num_drafts
    for draft, (tree, probs) in enumerate(found):
        own_bias = bias and Bias(*(part[draft] for part in bias))
        one = frames[draft, :, :-1], frames[draft, :, -1], tokens[draft]
        own_tree, own_probs = (chain if is_chain else search)(*one, *given_limits, own_bias)
        assert tree == own_tree and np.array_equal(probs, own_probs)
