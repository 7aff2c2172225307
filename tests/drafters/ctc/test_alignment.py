"""CTC probabilities, against a literal sum over every alignment."""

from itertools import product

import pytest
import torch
from torch.nn import functional as F

from drafters.ctc.alignment import IMPOSSIBLE, collapse, expected_acceptance, prefix_log_probs, states

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
    columns = log_probs[:, labels[0]][None]
    exact, prefix = prefix_log_probs(columns, columns, log_probs[None, :, BLANK:], labels)
    return exact[0], prefix[0]


def enumerated(log_probs, holds):
    """Return the log of the summed probability of the alignments whose text satisfies `holds`."""
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
def test_exact_probabilities_sum_over_the_alignments_that_collapse_to_the_label(label):
    log_probs = random_log_probs()
    exact, _ = computed(log_probs, label)
    for length in range(len(label) + 1):
        expected = enumerated(log_probs, lambda text, n=length: text == label[:n])
        if expected is None:
            assert exact[length] <= IMPOSSIBLE / 2
        else:
            torch.testing.assert_close(exact[length], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("label", FEASIBLE + INFEASIBLE)
def test_prefix_probabilities_sum_over_the_alignments_whose_text_begins_with_the_label(label):
    log_probs = random_log_probs()
    _, prefix = computed(log_probs, label)
    for length in range(1, len(label) + 1):
        expected = enumerated(log_probs, lambda text, n=length: text[:n] == label[:n])
        if expected is None:
            assert prefix[length - 1] <= IMPOSSIBLE / 2
        else:
            torch.testing.assert_close(prefix[length - 1], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("label", FEASIBLE)
def test_gradients_equal_those_of_the_literal_sum(label):
    logits = random_logits()  # gradients pass through the softmax, so frames after a prefix have none
    log_probs = logits.log_softmax(-1)
    exact, prefix = computed(log_probs, label)
    wholes = enumerated(log_probs, lambda text: text == label)
    begins = enumerated(log_probs, lambda text: text[: len(label)] == label)
    for ours, naive in ((exact[-1], wholes), (prefix[-1], begins)):
        got, expected = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (ours, naive))
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


# ---- distributions that depend on the last emitted label


def random_distributions(seed=0):
    """(T, V, V + 1) log-probabilities of each frame after each last emitted label."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(T, V, V + 1, generator=generator, dtype=torch.float64) * 2).log_softmax(-1).requires_grad_()


def columns(distributions, root, label):
    """Return ``enter``, ``stay`` and ``blank`` of one anchor."""
    before = [root, *label]
    enter, stay = distributions[:, before[:-1], label], distributions[:, label, label]
    return enter[None], stay[None], distributions[None, :, before, BLANK], torch.tensor([label])


def each_alignment(distributions, root):
    """Log-probability of every alignment, each frame conditioned on the last emitted label."""
    before = []
    for alignment in ALIGNMENTS:
        emitted = [root]
        for symbol in alignment.tolist():
            emitted.append(emitted[-1] if symbol == BLANK else symbol)
        before.append(emitted[:-1])
    return distributions[torch.arange(T), torch.tensor(before), torch.stack(ALIGNMENTS)].sum(1)


def summed_where(log_probs, holds):
    found = [holds(collapse(alignment, BLANK)) for alignment in ALIGNMENTS]
    return log_probs[torch.tensor(found)].logsumexp(0) if any(found) else None


@pytest.mark.parametrize("root", range(V))
def test_probabilities_of_all_alignments_of_conditioned_frames_sum_to_one(root):
    assert each_alignment(random_distributions(), root).logsumexp(0).item() == pytest.approx(0, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("root", [0, 1])  # a label may begin with the root token, which is emitted all the same
@pytest.mark.parametrize("label", FEASIBLE + INFEASIBLE, ids=str)
def test_conditioned_probabilities_and_gradients_equal_the_literal_sum(label, root):
    distributions = random_distributions()
    exact, prefix = prefix_log_probs(*columns(distributions, root, label))
    every = each_alignment(distributions, root)
    found = [(exact[0, n], lambda text, n=n: text == label[:n]) for n in range(len(label) + 1)]
    found += [(prefix[0, n - 1], lambda text, n=n: text[:n] == label[:n]) for n in range(1, len(label) + 1)]
    for number, (ours, holds) in enumerate(found):
        expected = summed_where(every, holds)
        if expected is None:
            assert ours <= IMPOSSIBLE / 2
            continue
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
        if number <= len(label):  # the literal sum of a prefix also has a gradient at later frames
            got, wanted = (torch.autograd.grad(x, distributions, retain_graph=True)[0] for x in (ours, expected))
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("label", [[1, 2], [2, 2], [0, 1, 0]], ids=str)
def test_gradients_of_prefixes_of_conditioned_distributions_pass_through_the_softmax(label):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(T, V, V + 1, generator=generator, dtype=torch.float64, requires_grad=True)
    distributions = logits.log_softmax(-1)
    _, prefix = prefix_log_probs(*columns(distributions, 1, label))
    expected = summed_where(each_alignment(distributions, 1), lambda text: text[: len(label)] == label)
    got, wanted = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (prefix[0, -1], expected))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_gradients_of_every_state_equal_finite_differences():
    """The upstream gradients have both signs and reach every output at once; one label has a repeat."""
    enter, stay, blank, labels = columns(random_distributions().detach(), 0, [1, 2, 2])
    leaves = [x.clone().requires_grad_() for x in (enter, stay, blank)]

    def reached(*emissions):
        entered, *ends = states(*emissions, labels)
        return [x[x > IMPOSSIBLE / 2] for x in (entered, *ends)]

    assert torch.autograd.gradcheck(reached, leaves)


@pytest.mark.slow
def test_states_before_each_frame_sum_over_the_alignments_so_far():
    distributions, label = random_distributions().detach(), [1, 2, 2]
    _, blank_end, label_end = states(*columns(distributions, 0, label))
    for t in range(1, T + 1):
        shorter = {tuple(alignment[:t].tolist()) for alignment in ALIGNMENTS}
        sums = torch.zeros(2, len(label) + 1, dtype=torch.float64)
        for alignment in shorter:
            text, probability, last = collapse(torch.tensor(alignment), BLANK), 1.0, 0
            for frame, symbol in enumerate(alignment):
                probability *= distributions[frame, last, symbol].exp()
                last = last if symbol == BLANK else symbol
            if text == label[: len(text)]:
                sums[int(alignment[-1] != BLANK), len(text)] += probability
        torch.testing.assert_close(torch.stack([blank_end[t, 0], label_end[t, 0]]).exp(), sums, rtol=0, atol=1e-12)


@pytest.mark.parametrize("label", FEASIBLE, ids=str)
def test_expected_acceptance_is_the_mean_common_prefix_of_a_sampled_text_and_the_label(label):
    distributions = random_distributions().detach()
    _, prefix = prefix_log_probs(*columns(distributions, 0, label))
    shared = []
    for alignment in ALIGNMENTS:
        text = collapse(alignment, BLANK)
        agrees = [a == b for a, b in zip(text, label, strict=False)] + [False]
        shared.append(agrees.index(False))
    expected = (each_alignment(distributions, 0).exp() * torch.tensor(shared)).sum()
    torch.testing.assert_close(expected_acceptance(prefix)[0], expected, rtol=0, atol=1e-12)
    first = torch.arange(len(label))[None] < 1
    torch.testing.assert_close(expected_acceptance(prefix, first), prefix[:, 0].exp())


@pytest.mark.parametrize("label", INFEASIBLE)
def test_gradients_of_impossible_labels_are_finite(label):
    logits = random_logits()
    exact, prefix = computed(logits.log_softmax(-1), label)
    gradient = torch.autograd.grad(exact.sum() + prefix.sum(), logits)[0]
    assert gradient.isfinite().all()


def test_exact_probabilities_equal_the_ctc_loss_of_torch_for_a_batch_with_repeats():
    generator = torch.Generator().manual_seed(1)
    frames, count, vocab, longest = 12, 16, 6, 5
    log_probs = torch.randn(count, frames, vocab + 1, generator=generator, dtype=torch.float64).log_softmax(-1)
    log_probs.requires_grad_()
    labels = torch.randint(0, 3, (count, longest), generator=generator)  # three tokens only: many repeats
    index = labels[:, None].expand(-1, frames, -1)
    columns = log_probs.gather(-1, index)
    exact, _ = prefix_log_probs(columns, columns, log_probs[..., vocab:], labels)
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
        # torch returns the gradient before the softmax, so each frame's probability is subtracted
        through_softmax = ours - log_probs.detach().exp() * ours.sum(-1, keepdim=True)
        torch.testing.assert_close(through_softmax, expected, rtol=0, atol=1e-10)


def test_prefix_probabilities_never_increase_along_a_label():
    _, prefix = computed(random_log_probs(3), [0, 1, 1, 2])
    assert prefix.diff().le(1e-12).all()
