"""Dynamic trees, against an enumeration of every path."""

from itertools import product

import pytest
import torch

from drafters.protocol import Limits
from drafters.trees import dynamic
from drafters.trees.search import SearchLimits
from tests.conftest import check_tree
from tests.drafters.conftest import paths_of

V = 4


def grow(logits, feed, width, top_k, limits):
    table = dynamic.grow(logits, feed, width, top_k, limits.max_depth, limits.eos)
    return dynamic.best_nodes(table.on_host(), Limits(limits.max_depth), limits.num_nodes, limits.min_probability)


class Walk:
    """A table of next-token distributions that depend on the full path; the state of the drafter is the paths."""

    def __init__(self, num_roots, seed=0, sharpness=2.0):
        self.num_roots, self.seed, self.sharpness = num_roots, seed, sharpness
        self.paths = [[()] for _ in range(num_roots)]
        self.num_steps = 0

    def logits(self, root, path):
        key = hash((self.seed, root, *path)) % 2**31
        return torch.randn(V, generator=torch.Generator().manual_seed(key), dtype=torch.float64) * self.sharpness

    def first(self):
        return torch.stack([self.logits(root, ()) for root in range(self.num_roots)])

    def step(self, tokens, slots):
        self.num_steps += 1
        self.paths = [
            [self.paths[root][slot] + (token,) for token, slot in zip(*row, strict=True)]
            for root, row in enumerate(zip(tokens.tolist(), slots.tolist(), strict=True))
        ]
        return torch.stack(
            [torch.stack([self.logits(root, path) for path in paths]) for root, paths in enumerate(self.paths)]
        )

    def probability(self, root, path):
        distributions = [self.logits(root, path[:at]).softmax(-1)[token] for at, token in enumerate(path)]
        return torch.stack(distributions).prod().item()

    def most_probable(self, root, depth, count, eos=()):
        every = [path for length in range(1, depth + 1) for path in product(range(V), repeat=length)]
        every = [path for path in every if not set(path[:-1]) & set(eos)]
        return sorted(every, key=lambda path: -self.probability(root, path))[:count]


@pytest.mark.parametrize("eos", [(), (2,), (0, 3)])
@pytest.mark.parametrize("count", [1, 7, 30, 500])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_without_limits_the_tree_has_the_most_probable_of_all_paths_in_order(depth, count, eos):
    walk = Walk(num_roots=3)
    trees = grow(walk.first(), walk.step, V**depth, V, SearchLimits(count, depth, eos))
    assert walk.num_steps == depth - 1
    for root, tree in enumerate(trees):
        check_tree(tree, V)
        assert paths_of(tree) == walk.most_probable(root, depth, count, eos)


@pytest.mark.parametrize(("width", "top_k"), [(1, 1), (1, 3), (2, 2), (3, 4), (5, 2)])
def test_with_limits_the_tree_equals_a_literal_beam_search(width, top_k):
    depth, count = 4, 9
    trees = grow((walk := Walk(2)).first(), walk.step, width, top_k, SearchLimits(count, depth, {1}))
    for root, tree in enumerate(trees):
        beam, nodes = [()], []
        for _ in range(depth):
            children = []
            for path in beam:
                best = Walk(2).logits(root, path).argsort(descending=True)[:top_k].tolist()
                children += [(*path, token) for token in best]
            nodes += children
            open_ones = [path for path in children if path[-1] != 1]
            beam = sorted(open_ones, key=lambda path: -walk.probability(root, path))[:width]
        expected = sorted(nodes, key=lambda path: -walk.probability(root, path))[:count]
        check_tree(tree, V)
        assert paths_of(tree) == expected


def test_a_parent_comes_before_a_child_of_probability_one():
    certain = torch.tensor([[0.0, 200.0, -200.0, -200.0]])
    step = lambda tokens, slots: certain[:, None].expand(-1, tokens.shape[1], -1)  # noqa: E731
    tree = grow(certain, step, 3, 2, SearchLimits(5, 5))[0]
    check_tree(tree, V)
    assert paths_of(tree) == [(1,) * length for length in range(1, 6)]


def test_improbable_nodes_are_left_out():
    whole, cut = (
        grow((walk := Walk(1)).first(), walk.step, 9, V, SearchLimits(99, 3, (), floor))[0] for floor in (0.0, 0.05)
    )
    assert paths_of(cut) == [path for path in paths_of(whole) if walk.probability(0, path) >= 0.05]
    assert 0 < len(cut) < len(whole)
