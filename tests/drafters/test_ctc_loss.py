"""The CTC losses against the same things computed over the whole vocabulary."""

import pytest
import torch
from torch.nn import functional as F

from drafters import TrainingBatch
from drafters.learned.ctc.loss import anchor_loss, gathered_log_probs

A, T, D, V, U = 7, 9, 6, 11, 4


@pytest.fixture
def parts():
    generator = torch.Generator().manual_seed(0)
    frames = torch.randn(A, T, D, generator=generator).requires_grad_()
    head = torch.randn(V, D, generator=generator)
    blank_row = torch.randn(D, generator=generator).requires_grad_()
    blank_bias = torch.tensor(-0.5, requires_grad=True)
    labels = torch.randint(0, 3, (A, U), generator=generator)
    return frames, labels, head, blank_row, blank_bias


def whole_log_probs(frames, head, blank_row, blank_bias):
    return torch.cat([frames @ head.T, (frames @ blank_row + blank_bias)[..., None]], -1).log_softmax(-1)


def leading(*lengths):
    return torch.arange(U) < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("chunk", [1, 2, 3, A, 100])
def test_gathered_columns_equal_the_whole_softmax_in_value_and_gradient(parts, chunk):
    frames, labels, head, *blank = parts
    ours = gathered_log_probs(frames, labels, head, *blank, chunk)
    whole = whole_log_probs(frames, head, *blank)
    expected = whole.gather(-1, labels[:, None].expand(-1, T, -1)), whole[..., V]
    torch.testing.assert_close(ours, expected)
    weights = [torch.randn_like(x) for x in expected]
    leaves = [frames, *blank]
    ours, expected = (sum((w * x).sum() for w, x in zip(weights, pair, strict=True)) for pair in (ours, expected))
    gradients = [torch.autograd.grad(x, leaves) for x in (ours, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_objective_ctc_is_torchs_ctc_loss_divided_by_the_length(parts):
    frames, labels, head, *blank = parts
    valid = leading(4, 3, 2, 1, 4, 2, 4)
    whole = whole_log_probs(frames, head, *blank)
    lengths = valid.sum(-1)
    theirs = F.ctc_loss(whole.transpose(0, 1), labels, torch.full((A,), T), lengths, blank=V, reduction="none")
    ours = anchor_loss(*gathered_log_probs(frames, labels, head, *blank, 3), labels, valid, "ctc", 0.9)
    torch.testing.assert_close(ours, theirs / lengths, rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(x.sum(), [frames, *blank]) for x in (ours, theirs / lengths)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)


def test_objective_prefix_is_the_weighted_mean_of_the_prefix_log_probabilities():
    """One frame a label and no blank: the prefix y_1..y_u is frames 1..u, and nothing else."""
    log_p = torch.tensor([0.5, 0.25, 0.125]).log()
    label_log_probs = torch.full((1, 3, 3), -1e30)
    label_log_probs[0].diagonal().copy_(log_p)
    blank = torch.full((1, 3), -1e30)
    labels = torch.tensor([[4, 5, 6]])
    prefix = log_p.cumsum(0)
    for length, decay in [(3, 0.5), (3, 1.0), (2, 0.5), (1, 0.9)]:
        valid = torch.arange(3)[None] < length
        weights = decay ** torch.arange(length)
        expected = -(weights * prefix[:length]).sum() / weights.sum()
        ours = anchor_loss(label_log_probs, blank, labels, valid, "prefix", decay)
        torch.testing.assert_close(ours, expected[None])


@pytest.mark.parametrize("objective", ["ctc", "prefix"])
def test_labels_that_are_not_valid_change_nothing(parts, objective):
    frames, labels, head, *blank = parts
    valid = leading(3, 2, 1, 2, 3, 1, 2)
    other = torch.where(valid, labels, (labels + 5) % V)
    ours = [
        anchor_loss(*gathered_log_probs(frames, y, head, *blank, 4), y, valid, objective, 0.9) for y in (labels, other)
    ]
    torch.testing.assert_close(*ours)


@pytest.mark.parametrize("objective", ["ctc", "prefix"])
def test_an_anchor_without_valid_labels_costs_nothing(parts, objective):
    frames, labels, head, *blank = parts
    losses = anchor_loss(
        *gathered_log_probs(frames, labels, head, *blank, 4), labels, leading(*[0] * A), objective, 0.9
    )
    assert losses.tolist() == [0.0] * A
    gradients = torch.autograd.grad(losses.sum(), [frames, *blank])
    assert all(gradient.eq(0).all() for gradient in gradients)


def test_labels_no_alignment_reaches_cost_nothing_and_their_gradients_are_finite(parts):
    frames, _, head, *blank = parts
    short = frames[:2, :4]  # four frames: 1 1 1 needs five, 1 2 3 4 just fits
    labels = torch.tensor([[1, 1, 1, 1], [1, 2, 3, 4]])
    for objective in ("ctc", "prefix"):
        columns = gathered_log_probs(short, labels, head, *blank, 4)
        losses = anchor_loss(*columns, labels, torch.ones_like(labels, dtype=torch.bool), objective, 0.9)
        gradients = torch.autograd.grad(losses.sum(), [frames, *blank])
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert losses[1] > 0
        if objective == "ctc":
            assert losses[0] == 0
            assert gradients[0][0].eq(0).all()
        else:  # the prefixes that do fit still count
            reachable = torch.tensor([[True, True, False, False], [True] * 4])
            torch.testing.assert_close(losses, anchor_loss(*columns, labels, reachable, objective, 0.9))


@pytest.mark.parametrize("objective", ["ctc", "prefix"])
def test_a_sequence_without_anchors_adds_nothing_to_its_batch(make_ctc, borrowed, objective):
    """The second sequence has assistant tokens only where no anchor may stand: right after the first position."""
    drafter = make_ctc(objective=objective)
    hidden, ids = torch.randn(2, 12, 16), torch.randint(0, 23, (2, 12))
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, 2:] = False
    both, _ = drafter.loss(TrainingBatch(hidden, hidden, ids, ids.roll(-1, 1), mask), borrowed)
    first = TrainingBatch(hidden[:1], hidden[:1], ids[:1], ids[:1].roll(-1, 1), mask[:1])
    alone, _ = drafter.loss(first, borrowed)
    torch.testing.assert_close(both, alone)


@pytest.mark.parametrize("objective", ["ctc", "prefix"])
def test_a_batch_without_anchors_gives_a_finite_loss_that_touches_every_weight(make_ctc, borrowed, objective):
    drafter = make_ctc(objective=objective, num_layers=2, hidden_layers=[1, -1])
    hidden, ids = torch.randn(2, 8, 32), torch.randint(0, 23, (2, 8))
    nothing = torch.zeros(2, 8, dtype=torch.bool)
    loss, _ = drafter.loss(TrainingBatch(hidden, hidden[..., :16], ids, ids, nothing), borrowed)
    loss.backward()
    assert loss.item() == 0
    for name, weight in drafter.named_parameters():
        assert weight.grad is not None, f"{name} has no gradient: data-parallel training would wait for it"
        assert weight.grad.isfinite().all()
