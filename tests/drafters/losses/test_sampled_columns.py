"""Losses over a sample of the vocabulary, against the sums over all of it."""

from math import comb

import pytest
import torch

from drafters.ctc.loss import CTCLossOptions, CTCOutput, ctc_loss
from drafters.losses.anchors import AnchoredFrames, sample_columns

A, T, U, V, D, R = 3, 4, 2, 8, 5, 2
LABELS = torch.tensor([[1, 4], [4, 6], [1, 7]])
VALID = torch.tensor([[True, True], [True, False], [True, False]])  # the valid labels are 1 and 4


def anchored(has_bias, has_blank):
    torch.manual_seed(0)  # of the samples
    generator = torch.Generator().manual_seed(0)
    frames, head, left, right = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((A, T, D), (V, D), (A, U + 1, R), (V + has_blank, R))
    )
    return AnchoredFrames(frames, LABELS, VALID, left if has_bias else None), head, right if has_bias else None


def exponentials(x, head, right):
    """(A, T, U + 1, columns): exp of the logits of each frame after each last token."""
    logits = (x.frames @ head.T)[:, :, None].expand(-1, -1, U + 1, -1)
    return (logits if right is None else logits + (x.left.double() @ right[: len(head)].double().T)[:, None]).exp()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_blank", [False, True])
def test_over_all_samples_the_mean_of_each_sum_is_that_of_the_whole_vocabulary(has_bias, has_blank):
    x, head, right = anchored(has_bias, has_blank)
    whole, sums = exponentials(x, head, right), {}
    for _ in range(300):
        sampled = sample_columns(x, head, right, 4, has_blank)
        some = exponentials(*sampled)
        columns = [(head == row).all(-1).nonzero().item() for row in sampled[1]]
        assert {1, 4} <= set(columns) and len(columns) == 4
        assert [columns[place] for place in sampled[0].labels[VALID]] == LABELS[VALID].tolist()
        torch.testing.assert_close(some[..., :2], whole[..., columns[:2]])
        if has_blank and has_bias:
            assert torch.equal(sampled[2][-1], torch.cat([right[-1], torch.zeros(1)]))
        sums[frozenset(columns)] = some.sum(-1)
    assert len(sums) == comb(V - 2, 2)
    torch.testing.assert_close(torch.stack([*sums.values()]).mean(0), whole.sum(-1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("num_columns", [1, V])
def test_the_labels_are_kept_in_any_case_and_the_whole_vocabulary_is_no_sample(num_columns):
    x, head, right = anchored(True, True)
    sampled, rows, factors = sample_columns(x, head, right, num_columns, True)
    assert len(rows) == max(num_columns, 2)
    if num_columns == V:
        assert sampled is x and rows is head and factors is right


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_ctc_loss_over_a_sample_is_near_the_whole_one_and_reaches_the_same_weights(has_bias):
    x, head, right = anchored(has_bias, True)
    leaves = [x.frames.requires_grad_(), *([x.left.requires_grad_(), right.requires_grad_()] if has_bias else [])]
    row, bias, options = torch.ones(D, dtype=torch.float64), torch.zeros((), dtype=torch.float64), CTCLossOptions()

    def loss_of(x, head, right):
        loss, _ = ctc_loss(x, head, CTCOutput(row, bias, right), options)
        return loss, torch.autograd.grad(loss, leaves)

    whole, gradients = loss_of(x, head, right)
    samples = [loss_of(*sample_columns(x, head, right, 6, True)) for _ in range(60)]
    assert torch.stack([loss for loss, _ in samples]).mean().item() == pytest.approx(whole.item(), rel=0.1)
    for index, gradient in enumerate(gradients):
        mean = torch.stack([gradients[index] for _, gradients in samples]).mean(0)
        assert torch.nn.functional.cosine_similarity(mean.flatten(), gradient.flatten(), dim=0) > 0.97
