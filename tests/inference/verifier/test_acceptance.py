"""Acceptance, on one small tree that is drawn below."""

import pytest
import torch

from drafters import DraftTree
from inference.verifier.acceptance import accept, accept_deepest
from inference.verifier.sampling import TreeLogits, Typical

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
    assert accept_deepest(tree, [1] * 5, [0, 1, 2, 3, 4]) == ([0, 1], [11, 12, 2])


# ---- typical acceptance, which is lossy


def test_the_deepest_acceptable_path_is_taken():
    def path(acceptable):
        return accept_deepest(TREE, [0, *acceptable], [90, 91, 92, 93, 94, 95, 96])

    assert path([0, 1, 0, 1, 1, 1]) == ([], [90])
    assert path([1, 0, 1, 1, 0, 0]) == ([0], [11, 91])
    assert path([1, 0, 1, 1, 1, 1]) == ([0, 4], [11, 15, 95])
    assert path([1, 1, 1, 1, 1, 1]) == ([0, 1, 3], [11, 12, 14, 94])


@pytest.mark.parametrize(("threshold", "alpha"), [(0.09, 0.3), (0.3, 0.9), (1.0, 2.0)])
def test_typical_acceptance_is_the_rule_of_medusa(threshold, alpha):
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        logits = torch.randn(7, 20, generator=generator) * 3
        decisions = Typical(threshold=threshold, alpha=alpha, temperature=0.7).decide(TreeLogits(logits, TREE))
        for node, (token, parent) in enumerate(zip(TREE.tokens, TREE.parents, strict=True)):
            distribution = (logits[1 + parent] / 0.7).softmax(-1)
            entropy = -sum(p * p.log() for p in distribution if p > 0)
            assert decisions[1 + node, 0] == (distribution[token] > min(threshold, alpha * torch.exp(-entropy)))


@pytest.mark.parametrize(("threshold", "alpha"), [(0, 0.3), (1.1, 0.3), (0.1, 0)])
def test_typical_acceptance_refuses_bounds_out_of_range(threshold, alpha):
    with pytest.raises(ValueError, match="threshold"):
        Typical(threshold=threshold, alpha=alpha)
