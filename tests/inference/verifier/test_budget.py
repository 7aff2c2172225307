"""The automatic budget in the decoding loop: it never changes the text."""

import pytest
import torch

import drafters
from drafters import DraftTree
from drafters.protocol import Limits, StepResult
from drafters.tree import ChildDistribution
from inference.budget import BudgetController
from inference.verifier.sampling import KeyedSampler
from inference.verifier.session import Session


class Drawing(drafters.Drafter):
    """A chain of two tokens that claims to be drawn from uniform distributions, and gives probabilities."""

    def propose(self, seq, limits):
        uniform = torch.full((12,), 1 / 12)
        drawn = [ChildDistribution(node - 1, uniform, (node,)) for node in range(2)]
        return DraftTree([3, 4], [-1, 0], 0, tuple(drawn), [0.1, 0.01])


@pytest.mark.parametrize("sampled", [False, True])
def test_whatever_the_budget_does_the_text_is_the_bases_own(pseudo_runner, scripted_budget, sampled):
    sampler = KeyedSampler(temperature=1.0, seed=3) if sampled else None
    text = Session(pseudo_runner(), drafters.NoDrafter(), sampler).run([1, 2, 3], 200).tokens
    for seed in range(4):
        budget = scripted_budget(seed)
        result = Session(pseudo_runner(), drafters.Joint(), sampler, budget=budget).run([1, 2, 3], 200)
        assert result.tokens == text
        assert [(step.accepted, step.emitted) for step in result.steps[1:]] == budget.told
        assert len({step.fed_candidates for step in result.steps}) > 3


def test_drawn_drafts_and_scratch_nodes_are_never_cut_by_what_they_are(pseudo_runner):
    class CutsAll(BudgetController):
        def cut(self, num_nodes, probabilities=()):
            return 0 if probabilities else num_nodes

    class Scratch(drafters.Drafter):
        def propose(self, seq, limits):
            return DraftTree([3], [-1], probabilities=[0.1]).with_scratch([4], [0])

    sampler = KeyedSampler(temperature=1.0, seed=3)
    for drafter in (Drawing(), Scratch()):
        budget = CutsAll()
        budget.request = lambda most: most
        result = Session(pseudo_runner(), drafter, sampler, budget=budget).run([1, 2], 20)
        assert {step.fed_candidates + step.fed_scratch for step in result.steps[:-3]} == {2}


def test_prefills_are_not_measured(pseudo_runner, scripted_budget):
    budget = scripted_budget()
    session = Session(pseudo_runner(), drafters.ANPD(), budget=budget)
    num_steps = [len(session.run(prompt, 20).steps) for prompt in ([1, 2, 3], [5, 6])]
    assert len(budget.told) == sum(num_steps) - 2


def test_what_the_base_said_after_fed_nodes_is_learned_from_a_part_of_a_draft():
    """The joint drafter remembers runners-up after the root and the nodes that were fed."""
    drafter = drafters.Joint(num_nodes=4, min_probability=0.001)
    drafter.begin([3, 4, 5, 3, 4])
    tree = drafter.propose([3, 4, 5, 3, 4], Limits(8))
    assert list(tree.tokens[:2]) == [5, 3] and len(tree.probabilities) == len(tree)
    fed = tree.first(1)
    drafter.observe(StepResult(1, fed, None, [0], [5, 9], [[5, 9, 8, 7], [9, 8, 7, 6]]))
    assert drafter._runners_up[0] == {4: (5, 9, 8, 7), 5: (9, 8, 7, 6)}
