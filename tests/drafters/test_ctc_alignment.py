"""CTC probabilities against the sum over every alignment, written out."""

from itertools import product

import pytest
import torch
from torch.nn import functional as F

from drafters.learned.ctc.alignment import IMPOSSIBLE, collapse, prefix_log_probs

T, V, BLANK = 5, 3, 3  # tokens 0, 1, 2
ALIGNMENTS = [torch.tensor(alignment) for alignment in product(range(V + 1), repeat=T)]
FEASIBLE = [[1], [1, 2], [2, 2], [0, 1, 0], [1, 1, 1], [0, 1, 2, 0, 1], [2, 0, 0, 1]]
INFEASIBLE = [[1, 1, 1, 1], [0, 1, 2, 2, 1], [0, 1, 2, 0, 1, 2]]


def random_logits(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(T, V + 1, generator=generator, dtype=torch.float64) * 2).requires_grad_()


def random_log_probs(seed=0):
    return random_logits(seed).detach().log_softmax(-1)


def computed(log_probs, label):
    labels = torch.tensor([label])
    exact, prefix = prefix_log_probs(log_probs[:, labels[0]][None], log_probs[None, :, BLANK], labels)
    return exact[0], prefix[0]


def enumerated(log_probs, holds):
    """log of the summed probability of the alignments whose text holds."""
    sums = [log_probs[range(T), a].sum() for a in ALIGNMENTS if holds(collapse(a, BLANK))]
    return torch.stack(sums).logsumexp(0) if sums else None


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([7, 7, 0, 7, 5], [7, 7, 5]),
        ([0, 0], []),
        ([7, 0, 0, 7], [7, 7]),
        ([7, 7, 7], [7]),
        ([0, 5, 5, 6, 0], [5, 6]),
    ],
)
def test_collapse_merges_repeats_then_drops_blanks(frames, text):
    assert collapse(torch.tensor(frames), blank=0) == text


@pytest.mark.parametrize("label", FEASIBLE + INFEASIBLE)
def test_exact_sums_over_the_alignments_that_collapse_to_the_label(label):
    log_probs = random_log_probs()
    exact, _ = computed(log_probs, label)
    for length in range(len(label) + 1):
        expected = enumerated(log_probs, lambda text, n=length: text == label[:n])
        if expected is None:
            assert exact[length] <= IMPOSSIBLE / 2
        else:
            torch.testing.assert_close(exact[length], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("label", FEASIBLE + INFEASIBLE)
def test_prefix_sums_over_the_alignments_whose_text_begins_with_the_label(label):
    log_probs = random_log_probs()
    _, prefix = computed(log_probs, label)
    for length in range(1, len(label) + 1):
        expected = enumerated(log_probs, lambda text, n=length: text[:n] == label[:n])
        if expected is None:
            assert prefix[length - 1] <= IMPOSSIBLE / 2
        else:
            torch.testing.assert_close(prefix[length - 1], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("label", FEASIBLE)
def test_gradients_are_those_of_the_written_out_sum(label):
    logits = random_logits()  # the frames after a prefix matter only as long as they need not sum to one
    log_probs = logits.log_softmax(-1)
    exact, prefix = computed(log_probs, label)
    wholes = enumerated(log_probs, lambda text: text == label)
    begins = enumerated(log_probs, lambda text: text[: len(label)] == label)
    for ours, naive in ((exact[-1], wholes), (prefix[-1], begins)):
        got, expected = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (ours, naive))
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("label", INFEASIBLE)
def test_gradients_of_what_cannot_happen_are_finite(label):
    logits = random_logits()
    exact, prefix = computed(logits.log_softmax(-1), label)
    gradient = torch.autograd.grad(exact.sum() + prefix.sum(), logits)[0]
    assert gradient.isfinite().all()


def test_exact_is_the_ctc_loss_of_torch_for_a_batch_with_repeats():
    generator = torch.Generator().manual_seed(1)
    frames, count, vocab, longest = 12, 16, 6, 5
    log_probs = torch.randn(count, frames, vocab + 1, generator=generator, dtype=torch.float64).log_softmax(-1)
    log_probs.requires_grad_()
    labels = torch.randint(0, 3, (count, longest), generator=generator)  # three tokens only: many repeats
    index = labels[:, None].expand(-1, frames, -1)
    exact, _ = prefix_log_probs(log_probs.gather(-1, index), log_probs[..., vocab], labels)
    for length in range(1, longest + 1):
        theirs = F.ctc_loss(
            log_probs.transpose(0, 1),
            labels[:, :length],
            torch.full((count,), frames),
            torch.full((count,), length),
            blank=vocab,
            reduction="none",
        )
        torch.testing.assert_close(-exact[:, length], theirs, rtol=0, atol=1e-10)
        ours, expected = (
            torch.autograd.grad(loss.sum(), log_probs, retain_graph=True)[0] for loss in (-exact[:, length], theirs)
        )
        # torch gives the gradient as seen through the softmax before it: less each frame's share
        through_softmax = ours - log_probs.detach().exp() * ours.sum(-1, keepdim=True)
        torch.testing.assert_close(through_softmax, expected, rtol=0, atol=1e-10)


def test_prefix_probabilities_never_grow_along_a_label():
    _, prefix = computed(random_log_probs(3), [0, 1, 1, 2])
    assert prefix.diff().le(1e-12).all()
