"""Draft trees from the frames of one draft: the CTC transform collapses every path and loses none."""

import numpy as np
import pytest
import torch

from benchmarks import paper_table2
from drafters import CTC, BaseWeights, Block, DraftTree, Limits, Medusa, recipe
from drafters.ctc.reference import collapse
from drafters.ctc.trees import collapsed
from drafters.trees.search import SearchLimits
from tests.drafters.conftest import SHAPE

BLANK = 23
CAT, DOG = 5, 6


def texts(tree):
    """The paths of a tree, which must be distinct and draftable."""
    tree.validate(BLANK)
    paths = [tuple(tree.path_tokens(node)) for node in range(len(tree))]
    assert len(set(paths)) == len(paths)
    return set(paths)


def random_frames(seed, num_frames=4, num_tokens=3, num_blanks=1):
    """All tokens of a small vocabulary are candidates of every frame."""
    distributions = np.random.default_rng(seed).dirichlet(np.full(num_tokens + num_blanks, 0.7), num_frames)
    tokens = np.arange(3, 3 + num_tokens)
    blank = distributions[:, -1] if num_blanks else np.empty(0)
    return paper_table2.Frames(distributions[:, :num_tokens], tokens, blank, BLANK)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("blank", [None, 3])
def test_the_transform_contains_the_collapse_of_every_path_and_nothing_else(seed, blank):
    draw = np.random.default_rng(seed)
    tree = DraftTree.from_paths(draw.integers(3, 6, (12, 5)).tolist())  # of three symbols: repeats are many
    paths = [torch.tensor(tree.path_tokens(node)) for node in range(len(tree))]
    wanted = {tuple(collapse(path, -1 if blank is None else blank)) for path in paths} - {()}
    assert texts(collapsed(tree, blank)) == wanted
    assert len(wanted) < len(tree)


def test_a_kept_blank_uses_up_budget_and_a_dropped_one_does_not():
    probs, blank = np.array([[0.3, 0.1], [0.2, 0.7]]), np.array([0.6, 0.1])
    frames = paper_table2.Frames(probs, np.array([CAT, DOG]), blank, BLANK)
    # ε | ε dog .42 | cat .3 | cat dog .21: the two first are lost
    assert texts(paper_table2.blanks_kept(frames, SearchLimits(4, 9))) == {(CAT,), (CAT, DOG)}
    # given a token: cat .75 | cat dog .583 | dog .25 | dog dog .194, before cat cat .167
    assert texts(paper_table2.blanks_dropped(frames, SearchLimits(4, 9))) == {(CAT,), (CAT, DOG), (DOG,), (DOG, DOG)}
    certain = paper_table2.Frames(np.array([[0.0, 0.0]]), np.array([CAT, DOG]), np.array([1.0]), BLANK)
    assert len(paper_table2.blanks_dropped(certain, SearchLimits(4, 9))) == 0, (
        "a frame that is surely blank drafts nothing"
    )


@pytest.mark.parametrize("kind", ["Medusa", "Block", "CTC"])
def test_every_tree_keeps_the_limits(kind):
    for seed in range(5):
        frames = random_frames(seed, num_blanks=int(kind == "CTC"))
        for build in paper_table2.WAYS[kind].values():
            tree = build(frames, SearchLimits(20, 3, {4}))
            assert all(len(path) <= 3 and 4 not in path[:-1] for path in texts(tree)) and len(tree) <= 20


@pytest.mark.parametrize(
    ("kind", "arguments", "way"),
    [
        (Medusa, {"num_heads": 3, "top_k": 4}, "plain"),
        (Block, {"num_frames": 4, "top_k": 3}, "plain"),
        (CTC, {"num_frames": 4, "num_labels": 3, "top_k": 23, "tree": "paper"}, "CTC"),
        (CTC, {"num_frames": 4, "num_labels": 3, "top_k": 3, "tree": "prefix"}, "prefix"),
    ],
)
def test_trees_that_drafters_build_too_are_the_same(kind, arguments, way):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        drafter = recipe.build(kind, SHAPE, {"num_nodes": 12, **arguments})
        for weight in drafter.parameters():
            torch.nn.init.normal_(weight, std=0.3)
        base_weights, hidden = BaseWeights(torch.randn(23, 16), torch.randn(23, 16)), torch.randn(20, 16)
    ids, anchors, limits = torch.arange(20) + 3, torch.tensor([1, 2, 7, 18]), Limits(max_depth=9, eos=frozenset({2}))
    build = paper_table2.WAYS[kind.__name__][way]
    draft = SearchLimits(12, 9, {2})
    ours = [build(frames, draft) for frames in paper_table2.frames_at(drafter, hidden, ids, anchors, base_weights)]
    assert ours == drafter.draft_at(hidden, ids, anchors, base_weights, limits)
    assert len({tuple(tree.tokens) for tree in ours}) > 1
