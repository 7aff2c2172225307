"""Acceptance, on one small tree that is drawn below."""

import pytest

from drafters import DraftTree
from inference.verifier.acceptance import accept

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


def test_scratch_is_never_accepted():
    tree = DraftTree([11, 12], [-1, 0]).with_scratch([13, 14], [-1, 0])
    assert accept(tree, [13, 1, 1, 1, 1]) == ([], [13])
    assert accept(tree, [11, 14, 1, 1, 1]) == ([0], [11, 14])
