"""Chains with a bias, found for a batch on the device, against the search on the host for each draft."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters import CTC, BaseShape, BaseWeights, Block, Limits
from drafters.block import BlockDraftOptions, BlockTrunkOptions
from drafters.ctc.drafter import CTCDraftOptions, CTCTrunkOptions
from drafters.ctc.loss import CTCLossOptions
from drafters.trees.candidates import choose

V = 30
SHAPE = BaseShape(hidden_size=8, vocab_size=V, num_layers=1, num_heads=1, head_dim=8, intermediate_size=8)
WEIGHTS = BaseWeights(torch.zeros(V, 8), torch.zeros(V, 8))


def make(kind, num_frames, floor):
    """A drafter of chains with a bias, for logits that are given to it."""
    draft = {"tree": "chain", "num_nodes": 7, "top_k": 3, "min_probability": floor}
    if kind == "block":
        drafter = Block(
            SHAPE, BlockTrunkOptions(num_frames=num_frames, markov_rank=3), draft=BlockDraftOptions(**draft)
        )
    else:
        trunk = CTCTrunkOptions(num_frames=num_frames, markov_rank=3)
        drafter = CTC(SHAPE, trunk, CTCLossOptions(num_labels=1), CTCDraftOptions(**draft))
    for factor in (drafter.markov.left, drafter.markov.right):
        torch.nn.init.normal_(factor, generator=torch.Generator().manual_seed(1))
    return drafter.double().requires_grad_(False)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("kind", ["ctc", "block"])
def test_each_draft_of_a_batch_has_the_chain_of_the_search_on_the_host(kind, data):
    num_drafts, num_frames, seed = (data.draw(st.integers(*ends)) for ends in ((2, 33), (1, 9), (0, 10**6)))
    floor, depth = data.draw(st.sampled_from([0.0, 1e-3, 0.05])), data.draw(st.integers(0, 9))
    drafter, generator = make(kind, num_frames, floor), torch.Generator().manual_seed(seed)
    sharpness = 6 * torch.rand(num_drafts, 1, 1, generator=generator, dtype=torch.float64)
    logits = sharpness * torch.randn(num_drafts, num_frames, V + (kind == "ctc"), generator=generator).double()
    if kind == "ctc":
        logits[..., -1] += 2.0  # a repetition needs a blank before it
    logits[:, :, 5] += 3.0
    roots = torch.randint(V, (num_drafts,), generator=generator)
    limits = Limits(depth, eos=frozenset({3, 8}))
    candidates = choose(logits, roots, V, drafter.num_candidates, drafter.output(WEIGHTS).bias)
    expected = drafter.grow(candidates, limits)
    found = drafter.trees_of(logits, roots, drafter.output(WEIGHTS), limits)
    assert found == expected and len(found) == num_drafts
    for chain, other in zip(found, expected, strict=True):
        torch.testing.assert_close(chain.probabilities, other.probabilities, rtol=1e-9, atol=0)


def test_a_token_may_be_repeated_after_a_blank():
    drafter, logits = make("ctc", 3, 0.0), torch.full((2, 3, V + 1), -1000.0).double()
    drafter.markov.right.zero_()
    logits[:, [0, 1, 2], [7, V, 7]] = 0.0
    logits[1, 1, [V, 7]] = logits[1, 1, [7, V]]
    twice, once = drafter.trees_of(logits, torch.tensor([7, 7]), drafter.output(WEIGHTS), Limits(9))
    assert twice.tokens == [7, 7] and twice.probabilities == [1.0, 1.0]
    assert once.tokens == [7] and once.probabilities == [1.0]


@pytest.mark.parametrize("kind", ["ctc", "block"])
def test_distributions_that_exclude_each_other_give_no_chain_and_no_error(kind):
    drafter, logits = make(kind, 2, 0.0).float(), torch.full((2, 2, V + (kind == "ctc")), -1000.0)
    logits[..., 3] = 0.0
    drafter.markov.left.fill_(1.0)
    drafter.markov.right.zero_()[3] = -2000.0
    trees = drafter.trees_of(logits, torch.tensor([0, 1]), drafter.output(WEIGHTS), Limits(9))
    assert all(torch.tensor(tree.probabilities).isfinite().all() for tree in trees)
    assert trees[0] == trees[1]
