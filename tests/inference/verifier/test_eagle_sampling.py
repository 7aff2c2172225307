"""Chains drawn by EAGLE and EAGLE-3 and accepted by rejection sampling do not change the base's distribution."""

from dataclasses import replace

import pytest
import torch

from drafters import EAGLE, EAGLE3, NoDrafter
from inference.verifier.runner import Runner
from inference.verifier.sampling import KeyedSampler
from inference.verifier.session import Session

VOCAB, PROMPT, RUNS = 6, [3, 4, 5], 500
ONE_IN_A_THOUSAND = 67  # 36 degrees of freedom


@pytest.fixture(scope="module")
def base(make_base):
    return make_base(vocab=VOCAB, layers=1, hidden=16)


def expected_distribution(base):
    """Joint distribution (V, V) of the second and third token of the base's text, summed over the first."""
    sampler = KeyedSampler()

    def after(*tokens):
        return sampler.probabilities(base.model(torch.tensor([[*PROMPT, *tokens]])).logits[0, -1:])[0]

    distribution = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for first, weight in enumerate(after()):
        second = after(first)
        distribution += weight * torch.stack([second[token] * after(first, token) for token in range(VOCAB)])
    return distribution


def chi_square(base, drafter):
    """Chi-square of many texts, the first token from the prefill and the next two drafted; and the share accepted."""
    counts, accepted, runner = torch.zeros(VOCAB, VOCAB, dtype=torch.float64), 0, Runner(base)
    for seed in range(RUNS):
        result = Session(runner, drafter, KeyedSampler(seed=seed)).run(PROMPT, 4)
        counts[result.tokens[1], result.tokens[2]] += 1
        accepted += sum(step.accepted for step in result.steps)
    expected = expected_distribution(base) * RUNS
    often = expected >= 4
    rare = (counts[~often].sum() - expected[~often].sum()) ** 2 / expected[~often].sum().clamp(min=4)
    return (((counts - expected) ** 2)[often] / expected[often]).sum().item() + rare.item(), accepted / RUNS


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "draws"), [(EAGLE, 1), (EAGLE, 2), (EAGLE3, 1)])
def test_drawn_chains_do_not_change_the_joint_distribution_of_two_tokens(make_random_eagle, base, kind, draws):
    drafter = make_random_eagle(kind, base, tree="chain", draws=draws, temperature=1.5)
    statistic, accepted = chi_square(base, drafter)
    assert statistic < ONE_IN_A_THOUSAND
    assert accepted > 0.3, "the test proves little if hardly anything is accepted"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [EAGLE, EAGLE3])
def test_drawn_chains_do_not_change_the_greedy_text(make_random_eagle, base, kind):
    expected = Session(Runner(base), NoDrafter()).run(PROMPT, 30).tokens
    drafter = make_random_eagle(kind, base, tree="chain", draws=2)
    result = Session(Runner(base), drafter).run(PROMPT, 30)
    assert result.tokens == expected and sum(step.accepted for step in result.steps) > 0


@pytest.mark.slow
def test_the_chi_square_detects_a_drafter_that_reports_a_wrong_distribution(make_random_eagle, base, monkeypatch):
    drafter = make_random_eagle(EAGLE, base, tree="chain", draws=1, temperature=0.3)
    honest = drafter.propose

    def propose(seq, limits):
        tree = honest(seq, limits)
        flat = torch.full((VOCAB,), 1 / VOCAB)
        return replace(
            tree, distributions=tuple(replace(distribution, probs=flat) for distribution in tree.distributions)
        )

    monkeypatch.setattr(drafter, "propose", propose)
    assert chi_square(base, drafter)[0] > ONE_IN_A_THOUSAND
