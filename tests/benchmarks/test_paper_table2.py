"""Draft trees from the frames of one draft: the CTC transform collapses every path and loses none."""

import numpy as np
import pytest
import torch

from benchmarks import paper_table2
from drafters import DraftTree
from drafters.ctc.reference import collapse
from drafters.ctc.trees import ctc_transform
from drafters.trees.search import Candidates, SearchLimits
from tests.conftest import check_tree

BLANK = 23
CAT, DOG = 5, 6


def texts(tree):
    """The paths of a tree, which must be distinct and draftable."""
    check_tree(tree, BLANK)
    paths = [tuple(tree.path_tokens(node)) for node in range(len(tree))]
    assert len(set(paths)) == len(paths)
    return set(paths)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("blank", [None, 3])
def test_the_transform_contains_the_collapse_of_every_path_and_nothing_else(seed, blank):
    draw = np.random.default_rng(seed)
    tree = DraftTree.from_paths(draw.integers(3, 6, (12, 5)).tolist())  # of three symbols: repeats are many
    paths = [torch.tensor(tree.path_tokens(node)) for node in range(len(tree))]
    wanted = {tuple(collapse(path, -1 if blank is None else blank)) for path in paths} - {()}
    assert texts(ctc_transform(tree, blank)) == wanted
    assert len(wanted) < len(tree)


def test_a_kept_blank_uses_up_budget_and_a_dropped_one_does_not():
    def read(build, probs, blank):
        (tree,) = build(Candidates(np.array([[CAT, DOG]]), np.array([probs]), np.array([blank])), SearchLimits(4, 9))
        return texts(tree)

    frames = [[0.3, 0.1], [0.2, 0.7]], [0.6, 0.1]
    # ε | ε dog .42 | cat .3 | cat dog .21: the two first are lost
    assert read(paper_table2.blanks_kept, *frames) == {(CAT,), (CAT, DOG)}
    # given a token: cat .75 | cat dog .583 | dog .25 | dog dog .194, before cat cat .167
    assert read(paper_table2.blanks_dropped, *frames) == {(CAT,), (CAT, DOG), (DOG,), (DOG, DOG)}
    assert read(paper_table2.blanks_dropped, [[0.0, 0.0]], [1.0]) == set(), "surely blank"
