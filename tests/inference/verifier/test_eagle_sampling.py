"""Chains drawn by EAGLE and EAGLE-3 and accepted by rejection sampling do not change the base's distribution.

The first token comes from the prefill; the next two, which are compared, are drafted.
"""

from dataclasses import replace

import pytest
import torch

from drafters import EAGLE, EAGLE3, NoDrafter
from inference.verifier.runner import Runner
from inference.verifier.session import Session
from tests.inference.verifier.oracles import chi_square_of_pairs

VOCAB, RUNS = 6, 500
ONE_IN_A_THOUSAND = 67  # 36 degrees of freedom


@pytest.fixture(scope="module")
def base(make_base):
    return make_base(vocab=VOCAB, layers=1, hidden=16)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "draws"), [(EAGLE, 1), (EAGLE, 2), (EAGLE3, 1)])
def test_drawn_chains_do_not_change_the_joint_distribution_of_two_tokens(make_random_ctc, base, kind, draws):
    drafter = make_random_ctc(base, kind, tree="chain", draws=draws, temperature=1.5)
    statistic, accepted = chi_square_of_pairs(base, drafter, RUNS, 4, first=1)
    assert statistic < ONE_IN_A_THOUSAND
    assert accepted > 0.3, "the test proves little if hardly anything is accepted"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [EAGLE, EAGLE3])
def test_drawn_chains_do_not_change_the_greedy_text(make_random_ctc, base, kind):
    expected = Session(Runner(base), NoDrafter()).run([3, 4, 5], 30).tokens
    drafter = make_random_ctc(base, kind, tree="chain", draws=2)
    result = Session(Runner(base), drafter).run([3, 4, 5], 30)
    assert result.tokens == expected and sum(step.accepted for step in result.steps) > 0


@pytest.mark.slow
def test_the_chi_square_detects_a_drafter_that_reports_a_wrong_distribution(make_random_ctc, base, monkeypatch):
    drafter = make_random_ctc(base, EAGLE, tree="chain", draws=1, temperature=0.3)
    honest = drafter.propose

    def propose(seq, limits):
        tree = honest(seq, limits)
        flat = torch.full((VOCAB,), 1 / VOCAB)
        return replace(
            tree, distributions=tuple(replace(distribution, probs=flat) for distribution in tree.distributions)
        )

    monkeypatch.setattr(drafter, "propose", propose)
    assert chi_square_of_pairs(base, drafter, RUNS, 4, first=1)[0] > ONE_IN_A_THOUSAND
