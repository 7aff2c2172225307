"""Medusa: its trees, and the names of its weights."""

from itertools import product

import pytest
import torch

from benchmarks import recipes
from drafters import BaseShape, BaseWeights, DraftTree, Limits, Medusa
from tests.conftest import refusal
from tests.drafters.conftest import paths

SMALL = BaseShape(hidden_size=8, vocab_size=6, num_layers=1, num_heads=1, head_dim=8, intermediate_size=8)
FREE = Limits(max_depth=9)


@pytest.fixture
def small():
    """A float64 drafter of three heads on six tokens, its states (4, D) and each head's probabilities (4, K, V)."""
    generator = torch.Generator().manual_seed(0)

    def make(**arguments):
        drafter = recipes.build(Medusa, SMALL, {"num_heads": 3, "top_k": 6} | arguments).double()
        torch.manual_seed(0)
        for weight in drafter.parameters():
            torch.nn.init.normal_(weight, std=0.5)
        base_weights = BaseWeights(*torch.zeros(2, 6, 8, dtype=torch.float64))
        states = torch.randn(4, 8, generator=generator, dtype=torch.float64)
        distributions = [
            head(block(states)).softmax(-1) for head, block in zip(drafter.lm_heads, drafter.blocks, strict=True)
        ]
        return drafter, base_weights, states, torch.stack(distributions, 1)

    with torch.random.fork_rng():
        yield make


def drafted(drafter, base_weights, states, limits=FREE):
    with torch.no_grad():
        table = drafter.table(states, torch.zeros(len(states), dtype=torch.long), base_weights, limits)
        return drafter.trees_from(table.on_host(), limits)


def by_probability(distribution):
    """Return every path of tokens and its probability, the most probable first."""
    every = [path for length in (1, 2, 3) for path in product(range(6), repeat=length)]
    return sorted(
        every, key=lambda path: -torch.stack([distribution[head, token] for head, token in enumerate(path)]).prod()
    )


@pytest.mark.parametrize("num_nodes", [1, 2, 7, 20, 258])
def test_the_tree_has_the_most_probable_combinations_of_all_heads(small, num_nodes):
    drafter, base_weights, states, distributions = small(num_nodes=num_nodes)
    for tree, distribution in zip(drafted(drafter, base_weights, states), distributions, strict=True):
        assert paths(tree) == set(by_probability(distribution)[:num_nodes])


def test_only_the_top_tokens_of_a_head_enter_the_tree(small):
    drafter, base_weights, states, distributions = small(num_nodes=258, top_k=2)
    for tree, distribution in zip(drafted(drafter, base_weights, states), distributions, strict=True):
        best = distribution.topk(2).indices.tolist()
        assert paths(tree) == {path for n in (1, 2, 3) for path in product(*best[:n])}


def test_a_chain_is_the_most_probable_token_of_each_head(small):
    drafter, base_weights, states, distributions = small(tree="chain")
    for tree, distribution in zip(drafted(drafter, base_weights, states), distributions, strict=True):
        assert tree == DraftTree.from_paths([distribution.argmax(-1).tolist()])


def test_a_static_tree_has_the_same_ranks_at_every_root(small):
    static = [[0], [1], [0, 2], [0, 2, 1], [3]]
    drafter, base_weights, states, distributions = small(static=static, num_nodes=2)
    trees = drafted(drafter, base_weights, states)
    for tree, distribution in zip(trees, distributions, strict=True):
        ranked = distribution.argsort(dim=-1, descending=True).tolist()
        assert tree == DraftTree.from_paths([[ranked[h][r] for h, r in enumerate(path)] for path in static])
        assert len(tree) == 5
    cut = drafted(drafter, base_weights, states, Limits(2, 3, frozenset({trees[0].tokens[0]})))[0]
    assert paths(cut) == {(trees[0].tokens[0],), (trees[0].tokens[1],), (trees[0].tokens[4],)}


@pytest.mark.parametrize(
    ("static", "said"),
    [
        ([[0, 0]], "comes before its parent"),
        ([[0], [0]], "repeats a path"),
        ([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]], "3 levels"),
        ([[6]], "does not fit"),
        ([0], "list of rank paths"),
        (7, "list of rank paths"),
    ],
)
def test_an_invalid_tree_of_ranks_is_refused(static, said):
    assert said in refusal(recipes.build, Medusa, SMALL, {"num_heads": 3, "static": static})
