"""Acceptance on a drawn tree."""

import pytest

from drafters import DraftTree
from inference.acceptance import accept

#    ─┬─ 11 (0) ─┬─ 12 (1) ── 14 (3)
#     │          └─ 15 (4)
#     └─ 13 (2) ── 12 (5)
TREE = DraftTree([11, 12, 13, 14, 15, 12], [-1, 0, -1, 1, 0, 2])


@pytest.mark.parametrize(
    ("picks", "path", "emitted"),
    [
        # what the base picks after the root, then after nodes 0 to 5
        ([99, 12, 14, 12, 1, 1, 1], [], [99]),
        ([11, 99, 14, 12, 1, 1, 1], [0], [11, 99]),
        ([11, 12, 99, 12, 1, 1, 1], [0, 1], [11, 12, 99]),
        ([11, 12, 14, 12, 77, 1, 1], [0, 1, 3], [11, 12, 14, 77]),
        ([11, 15, 14, 12, 1, 88, 1], [0, 4], [11, 15, 88]),
        ([13, 12, 14, 12, 1, 1, 66], [2, 5], [13, 12, 66]),
        ([12, 12, 12, 12, 12, 12, 12], [], [12]),  # 12 stands in the tree, but not below the root
        ([13, 12, 14, 14, 1, 1, 1], [2], [13, 14]),  # node 2 has no child 14; node 1 has
    ],
)
def test_the_path_follows_the_bases_own_picks(picks, path, emitted):
    assert accept(TREE, picks) == (path, emitted)


def test_an_empty_tree_emits_the_bases_pick():
    assert accept(DraftTree(), [5]) == ([], [5])


def test_the_order_of_siblings_changes_nothing():
    mirrored = DraftTree([13, 11, 12, 15, 12, 14], [-1, -1, 0, 1, 1, 4])
    picks = {(): 11, (11,): 12, (11, 12): 14, (11, 12, 14): 77}
    texts = []
    for tree in (TREE, mirrored):
        rows = [picks.get(tuple(tree.path_tokens(node)), 1) for node in range(len(tree))]
        texts.append(accept(tree, [picks[()], *rows])[1])
    assert texts == [[11, 12, 14, 77]] * 2
