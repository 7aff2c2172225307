"""The draft tree on hand-drawn examples, and on random ones against slow reference implementations."""

import random

import pytest
import torch

from drafters.tree import ROOT, ChildDistribution, DraftTree
from tests.conftest import check_tree

THE_CAT = DraftTree([11, 12, 13, 14], [-1, 0, -1, 1])
"""    ─┬─ 11 ── 12 ── 14
     └─ 13                 """


def random_tree(rng, size, vocab=50):
    parents = [rng.randrange(ROOT, node) for node in range(size)]
    return DraftTree(rng.sample(range(vocab), size), parents)


def ancestors(tree, node):
    return {node} | (ancestors(tree, tree.parents[node]) if tree.parents[node] != ROOT else set())


def test_paths_merge_by_common_prefix():
    tree = DraftTree.from_paths([[11, 12, 14], [13], [11, 12], [11, 12, 14]])
    assert (tree.tokens, tree.parents) == ([11, 12, 14, 13], [-1, 0, 1, -1])


def test_follow_stops_at_the_first_token_that_was_not_drafted():
    assert THE_CAT.follow([11, 12, 14, 11]) == [0, 1, 3]
    assert THE_CAT.follow([11, 13]) == [0]
    assert THE_CAT.follow([12]) == THE_CAT.follow([]) == DraftTree().follow([11]) == []
    assert THE_CAT.with_scratch([15], [0]).follow([11, 15]) == [0], "scratch nodes are never accepted"


def test_the_first_path_takes_the_first_child_at_every_node():
    tree = DraftTree(tokens=[5, 7, 8, 9, 6, 4], parents=[-1, -1, 0, 0, 2, 1])
    assert tree.first_path(8) == [5, 8, 6]
    assert tree.first_path(2) == [5, 8]
    assert tree.first_path(0) == DraftTree().first_path(3) == []
    assert tree.with_scratch([1], [4]).first_path(8) == [5, 8, 6]


def test_no_paths_and_an_empty_path_give_an_empty_tree():
    for tree in (DraftTree(), DraftTree.from_paths([]), DraftTree.from_paths([[]])):
        assert len(tree) == 0
        assert tree.depths == []
        assert tree.ancestor_mask().shape == (0, 0)
        assert tree.pruned(3, 3, {1}) is tree


@pytest.mark.parametrize("seed", range(5))
def test_a_node_attends_only_to_itself_and_its_ancestors(seed):
    tree = random_tree(random.Random(seed), 12)
    for node, row in enumerate(tree.ancestor_mask().tolist()):
        assert {other for other, seen in enumerate(row) if seen} == ancestors(tree, node)
        assert tree.depths[node] == len(ancestors(tree, node)) == len(tree.path_tokens(node))


@pytest.mark.parametrize("seed", range(20))
def test_pruning_keeps_the_first_nodes_within_the_limits(seed):
    rng = random.Random(seed)
    tree, depth, budget, eos = random_tree(rng, 15), rng.randrange(5), rng.randrange(12), set(rng.sample(range(50), 15))
    pruned = tree.pruned(depth, budget, eos)
    check_tree(pruned, 50)
    allowed = [
        path
        for path in (tuple(tree.path_tokens(node)) for node in range(len(tree)))
        if len(path) <= depth and not eos & set(path[:-1])
    ]
    assert [tuple(pruned.path_tokens(node)) for node in range(len(pruned))] == allowed[:budget]


@pytest.mark.parametrize(
    ("tree", "broken"),
    [
        (DraftTree([1, 2], [1, -1]), "parents come before"),
        (DraftTree([1, 2], [-1, -2]), "parents come before"),
        (DraftTree([1], [0]), "parents come before"),
        (DraftTree([7, 7], [-1, -1]), "distinct"),
        (DraftTree([50], [-1]), "vocabulary"),
        (DraftTree([-1], [-1]), "vocabulary"),
        (DraftTree([1, 2], [-1]), "one token and one parent"),
        (DraftTree([1, 2], [-1, 0], num_scratch=3), "num_scratch is out of range"),
        (DraftTree([1, 2, 3], [-1, 2, -1], num_scratch=1), "parents come before"),
        (DraftTree([1, 2], [-1, -1], distributions=(ChildDistribution(0, torch.ones(3), (1,)),)), "draws are children"),
        (
            DraftTree([1, 2], [-1, -1], num_scratch=1, distributions=(ChildDistribution(-1, torch.ones(3), (1,)),)),
            "a c",
        ),
    ],
)
def test_check_tree_names_the_broken_rule(tree, broken):
    with pytest.raises(AssertionError, match=broken):
        check_tree(tree, 50)


# ---- scratch nodes and distributions


THE_CAT_AND_SCRATCH = THE_CAT.with_scratch([13, 13, 15, 16], [-1, 0, 4, 6])
"""    ─┬─ 11 ─┬─ 12 ── 14        ─── 13 ─── 15 ── 16 scratch below the root
     │      └─ 13 scratch
     └─ 13                     """


def test_scratch_nodes_come_after_the_candidates_and_are_never_found_as_children():
    tree = THE_CAT_AND_SCRATCH
    check_tree(tree, 17)
    assert (tree.num_candidates, tree.num_scratch, len(tree)) == (4, 4, 8)
    assert tree.child(ROOT, 13) == 2 and tree.child(0, 13) is None
    assert tree.path_tokens(7) == [13, 15, 16]
    assert tree.depths == [1, 2, 1, 3, 1, 2, 2, 3]


def test_candidates_and_scratch_nodes_have_separate_depth_limits():
    tree = THE_CAT_AND_SCRATCH
    assert tree.pruned(3, 8, (), 3) is tree

    def kept(*limits):
        pruned = tree.pruned(*limits)
        check_tree(pruned, 17)
        return pruned.num_candidates, [tuple(pruned.path_tokens(node)) for node in range(len(pruned))]

    assert kept(1, 8, (), 2) == (2, [(11,), (13,), (13,), (11, 13), (13, 15)])
    assert kept(3, 8, (), 1) == (4, [(11,), (11, 12), (13,), (11, 12, 14), (13,)])
    assert kept(3, 5, (), 3) == (4, [(11,), (11, 12), (13,), (11, 12, 14), (13,)])
    # an end token stops the candidates below it, but not scratch nodes
    assert kept(3, 8, {11, 15}, 3) == (2, [(11,), (13,), (13,), (11, 13), (13, 15), (13, 15, 16)])


def test_pruning_updates_the_nodes_of_each_distribution():
    q = torch.full((20,), 0.05)
    distributions = (
        ChildDistribution(ROOT, q, (2, 0, 2)),
        ChildDistribution(0, q, (1,)),
        ChildDistribution(1, q, (3,)),
    )
    tree = DraftTree(THE_CAT.tokens, THE_CAT.parents, distributions=distributions)
    check_tree(tree, 20)
    assert tree.pruned(3, 4, ()) is tree

    def draws_within(*limits):
        return [(distribution.parent, distribution.draws) for distribution in tree.pruned(*limits).distributions]

    assert draws_within(2, 4, ()) == [(ROOT, (2, 0, 2)), (0, (1,))]
    assert draws_within(3, 2, ()) == [(ROOT, (0,)), (0, (1,))]
    assert draws_within(3, 4, {11}) == [(ROOT, (1, 0, 1))]
