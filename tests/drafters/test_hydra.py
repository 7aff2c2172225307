"""Hydra: heads that read the tokens before theirs, their trees, and the prefix attention of Hydra++."""

from itertools import product

import pytest
import torch

from drafters import BaseShape, BaseWeights, Hydra, Limits
from drafters.hydra import HydraDraftOptions, HydraHeadOptions, HydraLossOptions, PrefixAttention
from drafters.nn.draft_cache import DraftCache
from tests.drafters.conftest import paths

SMALL = BaseShape(hidden_size=8, vocab_size=5, num_layers=1, num_heads=2, head_dim=4, intermediate_size=8)


def randomised(module):
    module = module.double()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for weight in module.parameters():
            torch.nn.init.normal_(weight, std=0.5)
    return module


@pytest.fixture
def base_weights():
    return BaseWeights(*torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64))


def path_probability(drafter, state, root, path, base_weights):
    """Product of the heads' probabilities along a path, each conditioned on the tokens before it."""
    read, probability = base_weights.embedding[root], 1.0
    for head, token in enumerate(path):
        distribution = drafter.lm_heads[head](drafter.blocks[head](state, read)).softmax(-1)
        probability = probability * distribution[token]
        read = torch.cat([read, base_weights.embedding[token]])
    return float(probability)


def trees(drafter, states, roots, base_weights, limits):
    return drafter.trees_from(drafter.table(states, roots, base_weights, limits).on_host(), limits)


@torch.no_grad()
def test_a_head_computes_what_the_authors_code_does(base_weights):
    """Its first layer reads the state and all embeddings at once, twice: as the residual, and through SiLU."""
    drafter = randomised(Hydra(SMALL, HydraHeadOptions(3, num_layers=2)))
    states, path = torch.randn(4, 8, dtype=torch.float64), torch.tensor([[0, 4, 2], [1, 1, 3], [2, 0, 0], [4, 3, 1]])
    embedding, weights = base_weights.embedding, drafter.state_dict()
    for head, found in enumerate(drafter.head_states(states, path, embedding)):
        for row in range(4):
            read = torch.cat([states[row], *(embedding[token] for token in path[row, : head + 1])])
            name = f"blocks.{head}"
            residual, first, second = (
                (weights[f"{name}.{layer}.weight"], weights[f"{name}.{layer}.bias"])
                for layer in ("residual", "layers.0", "layers.1")
            )
            gated = first[0] @ read + first[1]
            x = residual[0] @ read + residual[1] + gated * gated.sigmoid()
            gated = second[0] @ x + second[1]
            torch.testing.assert_close(found[row], x + gated * gated.sigmoid())


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [1, 12, 155])
@torch.no_grad()
def test_without_a_width_limit_the_tree_has_the_most_probable_of_all_paths(base_weights, num_nodes):
    drafter = randomised(
        Hydra(SMALL, HydraHeadOptions(3, num_layers=2), draft=HydraDraftOptions(num_nodes, top_k=5, width=125))
    )
    states = torch.randn(3, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    roots = torch.tensor([0, 4, 2])
    every = [path for length in (1, 2, 3) for path in product(range(5), repeat=length)]
    for tree, state, root in zip(trees(drafter, states, roots, base_weights, Limits(9)), states, roots, strict=True):
        ranked = sorted(every, key=lambda path: -path_probability(drafter, state, root, path, base_weights))
        assert paths(tree) == set(ranked[:num_nodes])


@pytest.mark.parametrize("width", [1, 2, 4])
@torch.no_grad()
def test_only_the_most_probable_paths_of_a_level_are_extended(base_weights, width):
    drafter = randomised(Hydra(SMALL, HydraHeadOptions(3), draft=HydraDraftOptions(999, top_k=3, width=width)))
    state, root, eos = torch.randn(8, dtype=torch.float64), 3, frozenset({1})
    (tree,) = trees(drafter, state[None], torch.tensor([root]), base_weights, Limits(9, eos=eos))
    expected, going_on = set(), [()]
    for _ in range(3):
        children = []
        for path in going_on:
            ranked = sorted(range(5), key=lambda t: -path_probability(drafter, state, root, (*path, t), base_weights))
            children += [(*path, token) for token in ranked[:3]]
        expected |= set(children)
        alive = [path for path in children if path[-1] not in eos]
        going_on = sorted(alive, key=lambda path: -path_probability(drafter, state, root, path, base_weights))[:width]
    assert paths(tree) == expected


def test_noise_is_added_to_the_hidden_states_in_training_only():
    drafter, hidden = Hydra(SMALL, loss=HydraLossOptions(noise=3.0)).double(), torch.zeros(50, 20, 8).double()
    assert torch.equal(drafter.eval().encode(hidden), hidden)
    noise, most = drafter.train().encode(hidden), 3 / (20 * 8) ** 0.5
    assert 0.99 * most < noise.max() <= most and -most <= noise.min() < -0.99 * most
    assert torch.equal(Hydra(SMALL).train().encode(hidden.float()), hidden.float())


@torch.no_grad()
def test_prefix_attention_gives_the_same_states_token_by_token_as_in_one_pass():
    prefix = randomised(PrefixAttention(SMALL))
    hidden = torch.randn(1, 11, 8, dtype=torch.float64)
    whole, cache, start = prefix(hidden), DraftCache(), 0
    for end in (1, 2, 6, 7, 11):
        cache.append([prefix.keys_values(hidden[:, start:end], torch.arange(start, end)[None])])
        start = end
        before = [states[..., :-1, :] for states in cache.read()[0]]
        last = prefix.last_output(hidden[:, end - 1 : end], torch.tensor([[end - 1]]), *before)
        torch.testing.assert_close(last[0], whole[:, end - 1])
