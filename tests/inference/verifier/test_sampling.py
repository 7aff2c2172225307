"""The samplers: the distribution they draw from, and that the draws follow it."""

import random

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from drafters import DraftTree
from drafters.tree import ChildDistribution
from inference.options import SamplingOptions
from inference.verifier.acceptance import multi_round_rejection
from inference.verifier.sampling import Greedy, KeyedSampler, TreeLogits, most_probable

SETTINGS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 3},
    {"top_p": 0.7},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9},
    {"top_k": 1},
    {"top_p": 1e-6},
]


@pytest.fixture
def logits():
    return torch.randn(6, 9, generator=torch.Generator().manual_seed(0)) * 2


def warped(logits, temperature=1.0, top_k=0, top_p=1.0):
    """transformers' own order: temperature, top-k, top-p."""
    logits = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        logits = TopKLogitsWarper(top_k)(None, logits)
    if top_p < 1:
        logits = TopPLogitsWarper(top_p)(None, logits)
    return logits.double().softmax(-1)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_distribution_is_that_of_transformers_warpers(logits, setting):
    torch.testing.assert_close(KeyedSampler(**setting).probabilities(logits), warped(logits, **setting))


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_fine_grid_of_draws_picks_each_token_in_proportion_to_its_probability(logits, setting, monkeypatch):
    sampler, fine = KeyedSampler(**setting), 2000
    monkeypatch.setattr(sampler, "uniform", lambda position, stream=0: (position + 0.5) / fine)
    for row, distribution in zip(logits, warped(logits, **setting), strict=True):
        picks = sampler.pick(row.expand(fine, -1), range(fine))
        share = picks.bincount(minlength=9) / fine
        assert (share - distribution).abs().max() <= 1 / fine
        assert not (share > 0)[distribution == 0].any()


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-53])
def test_the_smallest_and_largest_draws_pick_tokens_with_probability_above_zero(draw, monkeypatch):
    sampler = KeyedSampler()
    monkeypatch.setattr(sampler, "uniform", lambda position, stream=0: draw)
    logits = torch.tensor([[-torch.inf, 1.0, 2.0, -torch.inf], [0.3, -torch.inf, -torch.inf, -torch.inf]])
    assert sampler.pick(logits, [1, 2]).tolist() == ([1, 0] if draw == 0 else [2, 0])


def test_draws_of_neighbouring_positions_are_independent():
    picks = KeyedSampler(seed=5).pick(torch.zeros(4001, 2), range(4001))
    pairs = (2 * picks[:-1] + picks[1:]).bincount(minlength=4)
    assert ((pairs - 1000) ** 2 / 1000).sum() < 16.3


def test_a_draw_depends_only_on_seed_and_position(logits):
    sampler = KeyedSampler(temperature=1.5, seed=7)
    together = sampler.pick(logits, range(10, 16)).tolist()
    alone = [sampler.pick(logits[i : i + 1], [10 + i]).item() for i in reversed(range(6))]
    assert together == alone[::-1] == KeyedSampler(temperature=1.5, seed=7).pick(logits, range(10, 16)).tolist()
    flat = torch.zeros(200, 9)
    assert not KeyedSampler(seed=1).pick(flat, range(200)).equal(KeyedSampler(seed=2).pick(flat, range(200)))
    assert len(set(sampler.pick(flat, [4] * 200).tolist())) == 1, (
        "one draw for a position, shared by all nodes that decide it"
    )


def test_greedy_takes_the_first_of_the_most_probable():
    logits = torch.tensor([[0.0, 2.0, 2.0], [3.0, 1.0, 3.0]])
    assert Greedy().decide(TreeLogits(logits, DraftTree([0], [-1]))).tolist() == [[1], [0]]


@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 9e-6])
def test_a_temperature_near_0_is_greedy(temperature, logits):
    sampler = SamplingOptions(temperature).sampler()
    assert isinstance(sampler, Greedy)
    assert KeyedSampler(temperature).pick(30 * logits, range(6)).equal(logits.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_most_probable_token_is_torchs_argmax(dtype):
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(1)).mul(4).round().to(dtype)
    logits[0], logits[1] = -torch.inf, 1.0
    ties = (logits == logits.max(-1, keepdim=True).values).sum(-1)
    assert (ties > 1).sum() > 10
    assert most_probable(logits).equal(logits.argmax(-1))


def decisions_everywhere(sampler, rows):
    """Decisions for all nodes, not only for those on the accepted path."""
    tree, positions, distributions = rows.tree, rows.positions, sampler.probabilities(rows.logits)
    picks = sampler.pick(rows.logits, positions)
    for children in tree.distributions:
        row = 1 + children.parent
        taken, choice, rest = multi_round_rejection(
            distributions[row], children, tree, lambda i, row=row: sampler.uniform(positions[row], 1 + i)
        )
        picks[row] = choice if taken else sampler._draws(rest[None], positions[row : row + 1])
    return picks[:, None]


def random_tree(rng, with_distributions, vocab=9):
    parents = [rng.randrange(-1, node) for node in range(12)]
    free = {parent: rng.sample(range(vocab), vocab) for parent in range(-1, 12)}
    tokens = [free[parent].pop() for parent in parents]
    distributions = []
    for parent in rng.sample(range(-1, 12), 9) if with_distributions else []:
        draws = tuple(node for node in range(12) if parents[node] == parent)
        probs = torch.tensor([rng.random() for _ in range(vocab)]).softmax(-1)
        distributions.append(ChildDistribution(parent, probs, draws))
    return DraftTree(tokens, parents, distributions=tuple(distributions))


@pytest.mark.slow
@pytest.mark.parametrize("setting", [{}, {"temperature": 0.5}, {"top_k": 4, "top_p": 0.9}])
@pytest.mark.parametrize("with_distributions", [True, False])
def test_drawing_only_along_the_accepted_path_accepts_the_same_path(with_distributions, setting):
    """Each position and round has one random number; nodes off the path are not drawn."""
    rng, lengths = random.Random(0), set()
    for seed in range(300):
        tree = random_tree(rng, with_distributions)
        logits = torch.randn(13, 9, generator=torch.Generator().manual_seed(seed)) * 2
        rows = TreeLogits(logits, tree, [0] * 7)
        sampler = KeyedSampler(seed=seed, **setting)
        decisions = sampler.decide(rows)
        path, emitted = sampler.accept(tree, decisions.tolist())
        assert (path, emitted) == sampler.accept(tree, decisions_everywhere(sampler, rows).tolist())
        assert [row for row, pick in enumerate(decisions[:, 0].tolist()) if pick >= 0] == [
            0,
            *(1 + node for node in path),
        ]
        lengths.add(len(path))
    assert lengths >= {0, 1, 2, 3}


@pytest.mark.parametrize(
    "setting", [{"temperature": 0.0}, {"temperature": -1.0}, {"top_k": -1}, {"top_p": -0.1}, {"seed": -1}]
)
def test_an_option_out_of_range_is_refused_by_its_name(setting):
    [(name, value)] = setting.items()
    with pytest.raises(ValueError, match=rf"^{name} must be .*, not {value}$"):
        KeyedSampler(**setting)


@pytest.mark.parametrize(("setting", "said"), [({"top_k": 5}, "top_k 5"), ({"top_p": 0.5}, "top_p 0.5")])
def test_top_k_and_top_p_are_refused_at_temperature_0(setting, said):
    with pytest.raises(ValueError, match=f"{said} is for sampling, .*: give a temperature above 0"):
        SamplingOptions(**setting).sampler()
    assert isinstance(SamplingOptions(0.7, **setting).sampler(), KeyedSampler)
