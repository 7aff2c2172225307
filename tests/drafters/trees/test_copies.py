"""Trees with copies: compared with the probabilities of all paths in a table."""

import pytest

from drafters.tree import DraftTree
from drafters.trees.search import SearchLimits, with_passage
from tests.conftest import check_tree

TREE = DraftTree([5, 6, 7, 5], [-1, 0, -1, 2], probabilities=[0.6, 0.5, 0.3, 0.1])
PATHS = {(5,): 0.6, (5, 6): 0.5, (7,): 0.3, (7, 5): 0.1}


def paths(tree):
    return {tuple(tree.path_tokens(node)): pytest.approx(p) for node, p in enumerate(tree.probabilities)}


@pytest.mark.parametrize("passage", [[5, 6, 9, 8], [5, 5, 5, 5], [7, 5, 1, 2], [1, 2, 3, 4]], ids=str)
@pytest.mark.parametrize("limits", [(9, 9), (4, 9), (9, 2), (9, 9, [5]), (9, 9, (), 0.2)], ids=str)
def test_the_most_probable_paths_of_a_tree_and_a_passage_are_taken(passage, limits):
    limits, share = SearchLimits(*limits), 0.4
    expected = {path: 0.6 * p for path, p in PATHS.items()}
    for depth in range(1, min(limits.max_depth, len(passage)) + 1):
        if not set(passage[: depth - 1]) & set(limits.eos):
            path = tuple(passage[:depth])
            expected[path] = expected.get(path, 0) + share
    best = sorted(expected.values(), reverse=True)[: limits.num_nodes]
    tree = with_passage(TREE, passage, share, limits)
    check_tree(tree, 10)
    assert list(tree.probabilities) == pytest.approx([p for p in best if p >= limits.min_probability])
    assert all(expected[path] == p for path, p in paths(tree).items())


@pytest.mark.parametrize(("share", "expected"), [(0.1, [5, 6]), (0.3, [5, 6]), (0.4, [7, 8, 9])])
def test_of_a_chain_the_path_with_more_expected_tokens_is_taken(share, expected):
    chain = DraftTree([5, 6], [-1, 0], probabilities=[0.8, 0.7])
    limits = SearchLimits(4, 3, is_chain=True, min_probability=0.05)
    tree = with_passage(chain, [7, 8, 9, 1], share, limits)
    assert list(tree.tokens) == expected == tree.first_path(9)


def test_without_a_passage_a_tree_stays_as_it_is():
    assert with_passage(TREE, [0, 0, 0], 0.0, SearchLimits(9, 9)) is TREE
