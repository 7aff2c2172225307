"""Multi-round rejection emits from the base's own distribution, by enumeration of all draws; biased rules must fail."""

from functools import partial
from itertools import product

import pytest
import torch

from drafters import Drafter, DraftTree, RequiredOutputs
from drafters.tree import ROOT, ChildDistribution
from inference.verifier.acceptance import multi_round_rejection
from inference.verifier.runner import Runner
from tests.inference.verifier.oracles import chi_square_of_pairs, threshold

BASE_DISTRIBUTIONS = {
    "plain": [0.5, 0.3, 0.15, 0.05],
    "with a zero": [0.6, 0.0, 0.4, 0.0],
    "one token": [0.0, 1.0, 0.0, 0.0],
    "flat": [0.25, 0.25, 0.25, 0.25],
}
DRAFT_DISTRIBUTIONS = {
    "near": [0.4, 0.3, 0.2, 0.1],
    "far": [0.05, 0.05, 0.3, 0.6],
    "the same": [0.5, 0.3, 0.15, 0.05],
    "on two tokens": [0.0, 0.0, 0.5, 0.5],
}


def every_draw(distribution, count):
    """All ways of drawing ``count`` tokens, each with its probability."""
    tokens = [token for token, p in enumerate(distribution) if p > 0]
    for draws in product(tokens, repeat=count):
        yield draws, torch.tensor([distribution[token] for token in draws], dtype=torch.float64).prod().item()


def tree_of(draws):
    """The drawn tokens as children of the root; equal draws are one node."""
    tokens = list(dict.fromkeys(draws))
    return DraftTree(tokens, [ROOT] * len(tokens)), tuple(tokens.index(token) for token in draws)


def accepts(rule, p, distribution, tree, index, token, u):
    """Whether draw ``index`` is accepted at ``u``, with all draws before it rejected where that is possible."""
    taken, choice, _ = rule(p, distribution, tree, lambda i: u if i == index else 1 - 1e-15)
    return bool(taken) and choice == token


def emitted_distribution(rule, base_distribution, draft_distribution, count):
    """Distribution of the token that a rule emits after one node, over all draws and all uniform numbers."""
    p, q = torch.tensor(base_distribution, dtype=torch.float64), torch.tensor(draft_distribution, dtype=torch.float64)
    emitted = torch.zeros_like(p)
    for draws, probability in every_draw(draft_distribution, count):
        tree, nodes = tree_of(draws)
        distribution = ChildDistribution(ROOT, q, nodes)
        refused = probability
        left = p  # what the paper's rule has left of the base's distribution
        for index, token in enumerate(draws):
            guess = min(1.0, (left[token] / q[token]).item())
            share = threshold(partial(accepts, rule, p, distribution, tree, index, token), guess)
            emitted[token] += refused * share
            refused *= 1 - share
            left = (left - q).clamp(min=0)
            left = left / left.sum().clamp(min=1e-30)
        if refused > 1e-7:
            taken, _, residual = rule(p, distribution, tree, lambda i: 1 - 1e-15)
            assert not taken
            emitted += refused * residual / residual.sum()
    return emitted


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("draft", DRAFT_DISTRIBUTIONS)
@pytest.mark.parametrize("base", BASE_DISTRIBUTIONS)
def test_the_emitted_token_follows_the_bases_distribution(base, draft, count):
    distribution = emitted_distribution(
        multi_round_rejection, BASE_DISTRIBUTIONS[base], DRAFT_DISTRIBUTIONS[draft], count
    )
    torch.testing.assert_close(
        distribution, torch.tensor(BASE_DISTRIBUTIONS[base], dtype=torch.float64), rtol=0, atol=1e-7
    )


def drawn_afresh(distribution, children, tree, uniform):
    """REST's rule: accept a child with its probability under the base, else sample from the full distribution."""
    for index, node in enumerate(children.draws):
        if uniform(index) < distribution[tree.tokens[node]]:
            return torch.tensor(True), torch.tensor(tree.tokens[node]), distribution
    return torch.tensor(False), torch.tensor(0), distribution


def test_a_biased_rule_is_detected():
    distribution = emitted_distribution(drawn_afresh, BASE_DISTRIBUTIONS["plain"], DRAFT_DISTRIBUTIONS["far"], 2)
    assert distribution.sum().item() == pytest.approx(1)
    assert (distribution - torch.tensor(BASE_DISTRIBUTIONS["plain"], dtype=torch.float64)).abs().max() > 0.01


# ---- through the whole engine


VOCAB, RUNS = 6, 800


@pytest.fixture(scope="module")
def bases(make_base):
    return make_base(vocab=VOCAB, layers=1, hidden=16), make_base(vocab=VOCAB, layers=1, hidden=16, seed=4)


class TwoDraws(Drafter):
    """Draws two children for the root from the distribution of a draft model."""

    def __init__(self, runner):
        self.runner = runner
        self.generator = torch.Generator().manual_seed(0)

    def propose(self, seq, limits):
        self.runner.reset()
        distribution = self.runner.forward(seq, DraftTree(), RequiredOutputs()).logits[0].double().softmax(-1)
        draws = torch.multinomial(distribution, 2, True, generator=self.generator).tolist()
        tree, nodes = tree_of(draws)
        return DraftTree(tree.tokens, tree.parents, distributions=(ChildDistribution(ROOT, distribution, nodes),))


ONE_IN_A_THOUSAND = 67  # 36 degrees of freedom


@pytest.mark.slow
def test_two_drawn_siblings_do_not_change_the_joint_distribution_of_two_tokens(bases):
    base, small = bases
    drafter = TwoDraws(Runner(small))
    assert chi_square_of_pairs(base, drafter, RUNS, 2)[0] < ONE_IN_A_THOUSAND
