"""Chains from a draft model: their length, their distributions, and that they are lossless."""

import random

import pytest
import torch

from drafters import ANPD, DraftModel, PromptLookup
from drafters.protocol import Limits
from drafters.training_free.draft_model import DraftedTokens, DraftSession
from inference.verifier.draft_model import DraftModelSession
from inference.verifier.session import Session
from tests.conftest import check_tree

FAR = Limits(max_depth=100)
PROMPTS = [1, 2, 3, 17]
NO_EOS = frozenset()


class Pen(DraftSession):
    """Writes 1, 2, 3, ..."""

    forwards, remembers, samples_drafts = 0, False, False

    def __init__(self, distributions=False):
        self.distributions = distributions

    def write(self, seq, num_tokens, eos=NO_EOS, threshold=0.0, draft_seed=0):
        tokens = list(range(1, num_tokens + 1))
        return DraftedTokens(
            tokens, [torch.full((9,), 1 / 9 + token) for token in tokens] if self.distributions else []
        )


def prompt_of(length, vocab=12):
    rng = random.Random(length)
    return [rng.randrange(vocab) for _ in range(length)]


def test_each_sampled_token_has_its_distribution_and_the_previous_token_as_parent():
    tree = DraftModel(Pen(distributions=True), num_draft=3).propose([8], FAR)
    check_tree(tree, 9)
    draws = [(drawn.parent, drawn.draws) for drawn in tree.distributions]
    assert draws == [(-1, (0,)), (0, (1,)), (1, (2,))]
    assert [round(distribution.probs[0].item() - 1 / 9) for distribution in tree.distributions] == [1, 2, 3]
    assert DraftModel(Pen(), num_draft=3).propose([8], FAR).distributions == ()


def drafters_of(pseudo_runner, seed):
    """A draft model alone, over n-grams, over a smaller model, and over a smaller model with n-grams."""

    def model(noise, drafter=None):
        return DraftModelSession(pseudo_runner(seed, noise=noise), drafter)

    return [
        DraftModel(model(0.3), num_draft=4),
        DraftModel(model(0.3, ANPD(order=3, num_draft=3)), num_draft=6),
        DraftModel(model(0.3, PromptLookup(2, 4)), num_draft=6),
        DraftModel(model(0.2, DraftModel(model(0.4), num_draft=3)), num_draft=7),
        DraftModel(model(0.2, DraftModel(model(0.4, ANPD(order=3)), num_draft=3)), num_draft=7),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("length", PROMPTS)
@pytest.mark.parametrize("which", range(5))
def test_the_text_is_lossless_step_by_step(pseudo_runner, which, length):
    taken = set()
    for seed in range(4):
        drafter, num_draft = drafters_of(pseudo_runner, seed)[which], (4, 6, 6, 7, 7)[which]
        draft_model = pseudo_runner(seed, noise=0.3 if which < 3 else 0.2)
        for prompt, eos in ((prompt_of(length), NO_EOS), (prompt_of(length + 5), frozenset({2}))):  # one after another
            seq, end = list(prompt), len(prompt) + 60
            for emitted, cost in Session(pseudo_runner(seed), drafter).decode(prompt, 60, eos):
                room = min(num_draft, end - len(seq) - 1)
                draft = draft_model.greedy(seq, room, eos) if room else []
                assert cost.fed_candidates == len(draft), "the draft is the text of the draft model alone"
                agreeing = [token == other for token, other in zip(draft, emitted, strict=False)]
                assert cost.accepted == [*agreeing, False].index(False)
                taken.add(cost.accepted)
                seq += emitted
            assert seq[len(prompt) :] == pseudo_runner(seed).greedy(prompt, 60, eos)
    assert len(taken) > 3, "some drafts should be accepted in part"


def test_forward_passes_of_all_draft_models_are_counted(pseudo_runner):
    middle, lowest = pseudo_runner(1, noise=0.2), pseudo_runner(1, noise=0.4)
    drafter = DraftModel(DraftModelSession(middle, DraftModel(DraftModelSession(lowest), num_draft=3)), num_draft=7)
    steps = Session(pseudo_runner(1), drafter).run([5, 6, 7], 60).steps
    assert sum(step.draft_forwards for step in steps) == middle.forwards + lowest.forwards
    assert middle.forwards < sum(step.fed_candidates for step in steps), (
        "the lowest model saves the middle one forwards"
    )
