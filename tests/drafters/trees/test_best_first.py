"""Best-first and static trees, against a list of all paths."""

from itertools import combinations, product

import numpy as np
import pytest

from drafters import DraftTree
from drafters.trees.best_first import Bias, SearchLimits, candidates, chain, fill, search, search_batch, static


def random_distributions(num_distributions, num_depths, num_candidates, seed=0):
    logits = np.random.default_rng(seed).normal(size=(num_distributions, num_depths, num_candidates)) * 1.5
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def listed(probs, tokens, max_depth, eos=()):
    """Return the probability of every path of tokens."""
    num_distributions, num_depths, num_candidates = probs.shape
    rows = np.broadcast_to(tokens, (num_depths, num_candidates))
    found = {}
    for depth in range(1, min(num_depths, max_depth) + 1):
        for picks in product(range(num_candidates), repeat=depth):
            path = tuple(int(rows[place, pick]) for place, pick in enumerate(picks))
            above = [num_candidates, *picks[:-1]] if num_distributions > 1 else [0] * depth
            if not set(path[:-1]) & set(eos):
                found[path] = np.prod([probs[above[place], place, pick] for place, pick in enumerate(picks)])
    return found


def by_path(tree, probs):
    tree.validate(vocab_size=100)
    assert all(parent == -1 or probs[node] <= probs[parent] for node, parent in enumerate(tree.parents))
    return {tuple(tree.path_tokens(node)): probs[node] for node in range(len(tree))}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert np.allclose([found[path] for path in expected], list(expected.values()), rtol=0, atol=1e-12)


def most_probable(every, num_nodes):
    return dict(sorted(every.items(), key=lambda pair: -pair[1])[:num_nodes])


SHARED, OWN = np.array([11, 12, 13]), np.array([[11, 12, 13], [14, 11, 12], [12, 13, 19], [11, 14, 15]])


@pytest.mark.parametrize("num_distributions", [1, 4])
@pytest.mark.parametrize("tokens", [SHARED, OWN], ids=["shared", "own"])
@pytest.mark.parametrize("num_nodes", [0, 1, 4, 17, 1000])
@pytest.mark.parametrize("max_depth, eos", [(9, ()), (2, ()), (0, ()), (9, {12, 14})])
def test_the_tree_has_the_most_probable_paths(num_distributions, tokens, num_nodes, max_depth, eos):
    for seed in range(3):
        probs = random_distributions(num_distributions, 4, 3, seed)
        best = most_probable(listed(probs, tokens, max_depth, eos), num_nodes)
        assert_same(by_path(*search(probs, tokens, num_nodes, max_depth, eos)), best)


@pytest.mark.parametrize("num_nodes", [4, 17, 1000])
def test_factors_give_the_tree_of_the_table_they_multiply_to(num_nodes):
    frames, factors = random_distributions(1, 4, 3)[0], random_distributions(1, 4, 3, seed=1)[0]
    bias = Bias(factors, 1 / (factors @ frames.T))  # after each of three candidates, and after the root
    table = factors[:, None] * frames * bias.scales[..., None]
    best = most_probable(listed(table, SHARED, 9), num_nodes)
    assert_same(by_path(*search(frames, SHARED, num_nodes, 9, bias=bias)), best)


@pytest.mark.parametrize("num_distributions", [1, 4])
@pytest.mark.parametrize("tokens", [SHARED, OWN], ids=["shared", "own"])
def test_a_chain_continues_with_the_most_probable_child(num_distributions, tokens):
    probs = random_distributions(num_distributions, 4, 3)
    every, expected, path = listed(probs, tokens, 4), {}, ()
    for _ in range(4):
        path = max((child for child in every if child[:-1] == path and len(child) == len(path) + 1), key=every.get)
        expected[path] = every[path]
    assert_same(by_path(*chain(probs, tokens, 100, 100)), expected)
    assert_same(by_path(*chain(probs, tokens, 3, 100)), most_probable(expected, 3))
    assert chain(probs, tokens, 9, 9, eos={path[1]})[0].tokens == list(path[: path.index(path[1]) + 1])


@pytest.mark.parametrize("find", [search, chain])
def test_improbable_paths_are_left_out(find):
    probs = random_distributions(4, 3, 3)
    every = by_path(*find(probs, SHARED, 1000, 9))
    for floor in (0.02, 0.2, 1.1):
        expected = {path: p for path, p in every.items() if p >= floor}
        assert_same(by_path(*find(probs, SHARED, 1000, 9, min_probability=floor)), expected)


@pytest.mark.parametrize("num_drafts", [1, 2, 8, 33])
@pytest.mark.parametrize("is_chain", [False, True])
@pytest.mark.parametrize("own_rows", [False, True])
def test_a_batch_finds_for_each_draft_what_its_own_search_finds(num_drafts, is_chain, own_rows):
    rng = np.random.default_rng(num_drafts)
    probs = np.exp(rng.normal(size=(num_drafts, 4, 6)) * rng.uniform(0, 6, (num_drafts, 1, 1)))
    probs /= probs.sum(-1, keepdims=True)
    tokens = rng.permuted(np.tile(np.arange(10), (num_drafts, 4, 1)), axis=2)[..., :6]
    tokens = tokens if own_rows else tokens[:, 0]
    bias = Bias(rng.random((num_drafts, 7, 6)), rng.random((num_drafts, 7, 4)))
    for given in (None, bias):
        found = search_batch(probs, tokens, SearchLimits(9, 3, {3, 4}, 0.01, is_chain), given)
        assert len(found) == num_drafts
        for draft, (tree, path_probs) in enumerate(found):
            own_bias = given and Bias(*(part[draft] for part in given))
            own = (chain if is_chain else search)(probs[draft], tokens[draft], 9, 3, {3, 4}, 0.01, own_bias)
            assert tree == own[0] and np.array_equal(path_probs, own[1])


def test_a_duplicate_candidate_counts_once():
    probs = random_distributions(4, 3, 3)
    places = [2, 0, 2, 1, 0]
    twice = search(probs[[*places, 3]][..., places], SHARED[places], 30, 9)
    assert_same(by_path(*twice), by_path(*search(probs, SHARED, 30, 9)))


def test_a_single_distribution_needs_no_extra_axis_and_no_candidates_give_no_tree():
    probs = random_distributions(1, 3, 3)
    assert search(probs[0], SHARED, 9, 9)[0] == search(probs, SHARED, 9, 9)[0]
    for empty in (np.zeros((3, 0)), np.zeros((0, 3)), np.zeros((0, 0))):
        assert len(search(empty, SHARED[: empty.shape[1]], 9, 9)[0]) == 0


def test_a_candidate_counts_at_its_first_place_in_a_row():
    usable, ends = candidates(np.array([5, 3, 5, 5, 3, 9]), eos={3})
    assert usable.tolist() == [1, 1, 0, 0, 0, 1] and ends.tolist() == [False, True, False, False, True, False]
    assert candidates(np.array([5, 3, 5, 5, 3, 9]), row=3)[0].tolist() == [1, 1, 0, 1, 1, 1]


# ---- the static tree


def prefix_closed_trees(shape, num_nodes):
    """Return every set of rank paths that is closed under prefixes."""
    every = [path for depth in range(1, shape[0] + 1) for path in product(range(shape[1]), repeat=depth)]
    for chosen in combinations(every, num_nodes):
        if all(path[:-1] in chosen or len(path) == 1 for path in chosen):
            yield chosen


@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("num_nodes", [1, 2, 4, 5])
@pytest.mark.parametrize("seed", range(3))
def test_no_other_tree_of_the_same_size_has_a_longer_acceptance_length(shape, num_nodes, seed):
    accuracies = np.random.default_rng(seed).random(shape) * 0.6

    def expected_length(paths):
        return sum(np.prod([accuracies[depth, rank] for depth, rank in enumerate(path)]) for path in paths)

    best = max(expected_length(paths) for paths in prefix_closed_trees(shape, num_nodes))
    found = static(accuracies, num_nodes)
    assert len(found) == num_nodes and np.isclose(expected_length(found), best, rtol=1e-12)
    assert all(path[:-1] in found[:place] for place, path in enumerate(found) if len(path) > 1)


def test_the_sum_of_accuracies_is_the_mean_depth_that_independent_heads_accept():
    """The right rank of every head is sampled many times; the mean accepted depth is the sum over the tree's nodes."""
    accuracies = np.array([[0.5, 0.2, 0.1], [0.4, 0.3, 0.05]])
    paths = static(accuracies, 6)
    expected = sum(np.prod([accuracies[depth, rank] for depth, rank in enumerate(path)]) for path in paths)
    total = 0.0
    for picks in product(range(4), repeat=2):  # rank 3: none of the three is right
        chance = np.prod([[*row, 1 - row.sum()][pick] for row, pick in zip(accuracies, picks, strict=True)])
        total += chance * max([len(path) for path in paths if path == picks[: len(path)]], default=0)
    assert np.isclose(total, expected, rtol=1e-12)


def test_ranks_that_are_never_right_are_left_out():
    assert static(np.array([[0.5, 0.0], [0.0, 0.0]]), 9) == [(0,)]
    assert static(np.ones((2, 2)), 0) == static(np.ones((0, 0)), 4) == []


@pytest.mark.parametrize("wrong", [[0.5], [[1.2, 0.1]], [[-0.1]], [[float("nan")]]])
def test_an_invalid_accuracy_is_refused(wrong):
    with pytest.raises(ValueError, match="accuracies must be probabilities"):
        static(np.array(wrong), 3)


def test_rank_paths_are_filled_with_each_heads_tokens():
    tokens = np.array([[5, 6], [7, 8]])
    tree = fill([(0,), (0, 0), (1,), (1, 0), (0, 1)], tokens)
    assert tree == DraftTree([5, 7, 6, 7, 8], [-1, 0, -1, 2, 0])
    tree.validate(10)
    assert fill([], tokens) == DraftTree([], [])


@pytest.mark.parametrize("paths", [[(0, 0)], [(0, 0), (0,)], [(0,), (0,)], [(2,)], [(-1,)], [()]])
def test_rank_paths_that_do_not_fit_the_heads_are_refused(paths):
    with pytest.raises(ValueError, match="does not fit"):
        fill(paths, np.array([[5, 6]]))


def test_rank_paths_deeper_than_the_heads_are_refused():
    with pytest.raises(ValueError, match=r"rank path \(0, 0\) does not fit"):
        fill([(0,), (0, 0)], np.array([[5, 6]]))
