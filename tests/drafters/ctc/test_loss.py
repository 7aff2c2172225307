"""The CTC losses, against the literal sum over all alignments in float64, torch's own loss, and the plain reference."""

import pytest
import torch
from torch.nn import functional as F

from drafters import TrainingBatch
from drafters.ctc.loss import (
    IMPOSSIBLE,
    CTCLossOptions,
    CTCOutput,
    ctc_loss,
    emit,
    run_recursion,
)
from drafters.ctc.reference import plain_loss
from drafters.losses import chunks, gathered_logits
from drafters.losses.anchors import AnchoredFrames
from drafters.nn.markov import Markov

T, V, U, D, R, BLANK = 5, 3, 3, 4, 2, 3
LABELS = torch.tensor([[0, 1, 2], [1, 1, 0], [2, 2, 2], [0, 1, 0], [2, 0, 0], [1, 2, 1]])
LENGTHS = torch.tensor([3, 3, 3, 2, 0, 1])
ROOTS = torch.tensor([0, 2, 2, 1, 1, 0])  # anchors 0 and 2 have their root as first label, the others do not
A = len(LABELS)
VALID = torch.arange(U) < LENGTHS[:, None]


class Case:
    """Six anchors, their weights, and a literal loss from softmax, alignments and products."""

    def __init__(self, literal_texts, has_bias=False):
        generator = torch.Generator().manual_seed(0)

        def draw(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.literal_texts = literal_texts
        self.frames, self.head = draw(A, T, D), draw(V, D)
        self.blank_row, self.blank_bias = draw(D), draw(()) - 1
        self.markov = None
        self.leaves = [self.frames, self.blank_row, self.blank_bias]
        if has_bias:
            self.markov = Markov(V, R, V + 1).double()
            for weight in self.markov.parameters():
                weight.data = draw(*weight.shape)
            self.leaves += [*self.markov.parameters()]
        for leaf in self.leaves:
            leaf.requires_grad_()

    def anchored(self, labels=LABELS, roots=ROOTS, valid=None, frames=None):
        left = None
        if self.markov is not None:
            left, _ = self.markov.factors(torch.cat([roots[:, None], labels], 1))
        frames = self.frames[: len(labels)] if frames is None else frames
        valid = VALID[: len(labels)] if valid is None else valid
        return AnchoredFrames(frames, labels, valid, left)

    @property
    def output(self):
        return CTCOutput(self.blank_row, self.blank_bias, None if self.markov is None else self.markov.right)

    def loss(self, anchored=None, **options):
        return ctc_loss(anchored or self.anchored(), self.head, self.output, CTCLossOptions(**options))

    def states(self, anchored):
        return run_recursion(*emit(anchored, self.head, self.output), anchored.labels)

    def probs(self, anchor, num_frames=T):
        """(T, V, V + 1) distributions of each frame after each last emitted label."""
        frames = self.frames[anchor, :num_frames]
        logits = torch.cat([frames @ self.head.T, (frames @ self.blank_row + self.blank_bias)[:, None]], 1)
        bias = torch.zeros(V, V + 1) if self.markov is None else self.markov(torch.arange(V))
        return (logits[:, None] + bias).softmax(-1)

    def texts(self, anchor):
        return self.literal_texts(self.probs(anchor), int(ROOTS[anchor]))

    def written_out(self, objective="prefix", decay=0.9):
        total = 0.0
        for anchor in range(A):
            label, texts = LABELS[anchor, : LENGTHS[anchor]].tolist(), self.texts(anchor)
            prefix = [texts.begins(label[:n]) for n in range(1, len(label) + 1)]
            prefix = [p for p in prefix if p > 0]
            factor = torch.tensor([decay**u for u in range(len(prefix))], dtype=torch.float64)
            factor = factor / factor.sum()
            loss = torch.zeros((), dtype=torch.float64)
            if objective == "prefix":
                loss = loss - sum(w * p.log() for w, p in zip(factor, prefix, strict=True))
            elif label and (whole := texts.whole(label)) > 0:
                loss = loss - whole.log() / len(label)
            total = total + loss
        return total / (LENGTHS > 0).sum()


@pytest.fixture(params=[False, True], ids=["frame distributions", "Markov bias"])
def case(request, literal_texts):
    return Case(literal_texts, request.param)


def test_a_copy_adds_its_probability_to_every_prefix_of_the_passage(case):
    copied = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1], [1, 1, 0], [0, 0, 0], [1, 0, 0]]).bool()
    logits = torch.linspace(-2, 3, A, dtype=torch.float64, requires_grad=True)
    anchored = case.anchored()._replace(copied=copied, copy_logits=logits)
    loss, metrics = case.loss(anchored, decay=0.6)
    total, accepted = torch.zeros((), dtype=torch.float64), 0.0
    for anchor, share in enumerate(logits.sigmoid()):
        label, texts = LABELS[anchor, : LENGTHS[anchor]].tolist(), case.texts(anchor)
        begins = [texts.begins(label[: u + 1]) for u in range(len(label))]
        prefix = [(1 - share) * p + share * is_copied for p, is_copied in zip(begins, copied[anchor], strict=False)]
        factors = [(0.6**u, p) for u, p in enumerate(prefix) if p > 0]
        total = total - sum(w * p.log() for w, p in factors) / sum(w for w, _ in factors) if factors else total
        accepted += sum(prefix)
    torch.testing.assert_close(loss, total / (LENGTHS > 0).sum(), rtol=0, atol=1e-12)
    torch.testing.assert_close(metrics["expected_acceptance"], accepted.detach() / 5, rtol=0, atol=1e-12)
    leaves = [*case.leaves, logits]
    torch.testing.assert_close(*(torch.autograd.grad(x, leaves) for x in (loss, total / 5)), rtol=0, atol=1e-10)


@pytest.mark.parametrize("objective", ["ctc", "prefix"])
def test_the_plain_loss_is_the_sum_over_all_alignments_and_the_fast_one_equals_it(case, objective):
    labels = [label[:length] for label, length in zip(LABELS.tolist(), LENGTHS.tolist(), strict=True)]
    probs = torch.stack([case.probs(anchor) for anchor in range(A)])
    plain = plain_loss(probs, ROOTS.tolist(), labels, objective, 0.6)
    fast, literal = case.loss(objective=objective, decay=0.6)[0], case.written_out(objective, 0.6)
    gradients = [torch.autograd.grad(loss, case.leaves) for loss in (plain, literal, fast)]
    for loss, gradient in ((literal, gradients[1]), (fast, gradients[2])):
        torch.testing.assert_close(plain, loss, rtol=0, atol=1e-12)
        torch.testing.assert_close(gradients[0], gradient, rtol=0, atol=1e-11)


# ---- the recursion

REACHABLE = [[1], [1, 2], [2, 2], [0, 1, 0], [1, 1, 1], [0, 1, 2, 0, 1], [2, 0, 0, 1]]
OUT_OF_REACH = [[1, 1, 1, 1], [0, 1, 2, 2, 1], [0, 1, 2, 0, 1, 2]]  # of five frames, where repeats are merged


@pytest.mark.parametrize("label", REACHABLE + OUT_OF_REACH, ids=str)
def test_probabilities_and_gradients_are_sums_over_the_alignments(case, label):
    """And those of labels that no alignment reaches are impossible, with finite gradients."""
    anchors = torch.tensor([label]), ROOTS[:1], torch.ones(1, len(label)).bool()
    states = case.states(case.anchored(*anchors))
    texts, prefixes = case.texts(0), [label[:length] for length in range(len(label) + 1)]
    expected = torch.stack([*map(texts.whole, prefixes), *map(texts.begins, prefixes[1:])])
    log_probs = torch.cat([states.exact[0], states.prefix[0]])
    possible = expected > 0
    assert possible.all() or label in OUT_OF_REACH
    assert (log_probs[~possible] <= IMPOSSIBLE / 2).all()
    torch.testing.assert_close(log_probs[possible], expected[possible].log(), rtol=0, atol=1e-12)
    upstream = torch.randn(len(log_probs), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    got = torch.autograd.grad((upstream * log_probs)[possible].sum(), case.leaves)
    wanted = torch.autograd.grad((upstream[possible] * expected[possible].log()).sum(), case.leaves)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)
    states = case.states(case.anchored(*anchors))  # a backward pass can run only once
    every = torch.autograd.grad(states.exact.sum() + states.prefix.sum(), case.leaves, allow_unused=True)
    assert all(gradient.isfinite().all() for gradient in every)


def random_columns(num_anchors=1, num_frames=T, vocab_size=V, num_labels=U, num_tokens=V):
    generator = torch.Generator().manual_seed(1)
    shape = num_anchors, num_frames, vocab_size + 1
    log_probs = torch.randn(*shape, generator=generator, dtype=torch.float64).log_softmax(-1).requires_grad_()
    labels = torch.randint(0, num_tokens, (num_anchors, num_labels), generator=generator)
    return log_probs, labels, log_probs.gather(-1, labels[:, None].expand(-1, num_frames, -1))


def test_exact_probabilities_equal_the_ctc_loss_of_torch_for_a_batch_with_repeats():
    frames, count, vocab, longest = 12, 16, 6, 5
    log_probs, labels, enter = random_columns(count, frames, vocab, longest, num_tokens=3)  # many repeats
    exact = run_recursion(enter, enter, log_probs[..., vocab:], labels).exact
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
        gradient, torch_gradient = (
            torch.autograd.grad(loss.sum(), log_probs, retain_graph=True)[0] for loss in (-exact[:, length], theirs)
        )
        # torch returns the gradient before the softmax, so each frame's probability is subtracted
        through_softmax = gradient - log_probs.detach().exp() * gradient.sum(-1, keepdim=True)
        torch.testing.assert_close(through_softmax, torch_gradient, rtol=0, atol=1e-10)


# ---- the losses


@pytest.mark.parametrize("max_bytes", [1, 8 * 40 * V], ids=["one", "some"])
@pytest.mark.parametrize("settings", [{"objective": "ctc"}, {"objective": "prefix", "decay": 0.6}], ids=str)
def test_loss_and_gradients_equal_those_of_the_literal_sum(case, settings, monkeypatch, max_bytes):
    monkeypatch.setattr(chunks, "MAX_BYTES", max_bytes)
    loss, expected = case.loss(**settings)[0], case.written_out(**settings)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(3 * value, case.leaves) for value in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-11)


def test_the_metrics_are_the_mean_blank_share_and_the_mean_expected_acceptance(case, monkeypatch):
    blank, acceptance = [], []
    for anchor, length in enumerate(LENGTHS.tolist()):
        texts, label = case.texts(anchor), LABELS[anchor].tolist()
        if length:
            blank.append(case.probs(anchor)[:, ROOTS[anchor], BLANK].mean())
            acceptance.append(sum(texts.begins(label[:n]) for n in range(1, length + 1)))
    for max_bytes in (chunks.MAX_BYTES, 1):
        monkeypatch.setattr(chunks, "MAX_BYTES", max_bytes)
        _, numbers = case.loss()
        assert not any(number.requires_grad for number in numbers.values())
        torch.testing.assert_close(numbers["blank_share"], torch.stack(blank).mean().detach())
        torch.testing.assert_close(numbers["expected_acceptance"], torch.stack(acceptance).mean().detach())


@pytest.mark.parametrize("objective", ["ctc", "prefix"])
def test_a_loss_never_holds_the_logits_of_more_than_a_chunk(monkeypatch, objective):
    """Eight anchors of 2,000 tokens; 200 KB hold the vectors of two anchors."""
    num_tokens, generator, held = 2000, torch.Generator().manual_seed(0), []
    frames, head, row = (
        torch.randn(*shape, D, generator=generator).requires_grad_() for shape in ((8, T), (num_tokens,), ())
    )
    plain = gathered_logits.logits
    monkeypatch.setattr(gathered_logits, "logits", lambda x, head: held.append(x.shape[:-1]) or plain(x, head))
    labels = torch.randint(num_tokens, (8, U), generator=generator)
    anchored = AnchoredFrames(frames, labels, torch.ones(8, U, dtype=torch.bool))
    options = CTCLossOptions(objective=objective)
    monkeypatch.setattr(chunks, "MAX_BYTES", 200_000)
    ctc_loss(anchored, head, CTCOutput(row, torch.zeros(())), options)
    assert held == [(2, T)] * 4


@pytest.mark.parametrize("objective", ["ctc", "prefix"])
def test_labels_without_an_alignment_add_nothing(case, objective):
    """Three frames can emit y y but not y y y."""
    anchors = torch.tensor([[1, 1, 1], [1, 2, 0]]), torch.tensor([0, 0])
    all_valid, two_valid = torch.ones(2, 3, dtype=torch.bool), torch.tensor([[True, True, False], [True] * 3])
    loss, _ = case.loss(case.anchored(*anchors, all_valid, case.frames[:2, :3]), objective=objective)
    gradients = torch.autograd.grad(loss, case.leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)
    if objective == "ctc":
        assert gradients[0][0].eq(0).all()
        assert loss > 0
    else:
        expected, _ = case.loss(case.anchored(*anchors, two_valid, case.frames[:2, :3]), objective=objective)
        torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("head_dtype", [torch.float32, torch.bfloat16])
def test_half_precision_affects_products_but_not_sums(has_bias, head_dtype):
    """With bfloat16 frames under autocast, sums over thousands of tokens still equal those in float64."""
    generator = torch.Generator().manual_seed(0)
    num_tokens, anchors = 4000, 5
    head = torch.randn(num_tokens, D, generator=generator)
    frames = torch.randn(anchors, T, D, generator=generator).bfloat16()
    labels, roots = torch.randint(num_tokens, (anchors, U), generator=generator), torch.arange(anchors)
    output, left = CTCOutput(torch.randn(D, generator=generator), torch.tensor(-1.0)), None
    if has_bias:
        markov = Markov(num_tokens, R, num_tokens + 1)
        torch.nn.init.normal_(markov.right, std=0.1)
        left, right = markov.factors(torch.cat([roots[:, None], labels], 1))
        output = output._replace(right=right)
    valid = torch.ones_like(labels, dtype=torch.bool)
    wide = CTCOutput(*(x if x is None else x.double() for x in output))
    exact, _ = ctc_loss(AnchoredFrames(frames.double(), labels, valid, left), head.to(head_dtype).double(), wide)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = ctc_loss(AnchoredFrames(frames, labels, valid, left), head.to(head_dtype), output)
    assert loss.dtype == torch.float32
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[head_dtype]
    torch.testing.assert_close(loss.double(), exact, rtol=tolerance, atol=0)


@pytest.mark.parametrize("objective", ["ctc", "prefix"])
def test_a_sequence_without_anchors_adds_nothing_to_its_batch(make_ctc, base_weights, objective):
    """The second sequence has assistant tokens only at positions that cannot be anchors."""
    drafter = make_ctc(objective=objective)
    hidden, ids = torch.randn(2, 12, 16), torch.randint(0, 23, (2, 12))
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, 2:] = False
    both, _ = drafter.loss(TrainingBatch(hidden, hidden, ids, ids.roll(-1, 1), mask), base_weights)
    first = TrainingBatch(hidden[:1], hidden[:1], ids[:1], ids[:1].roll(-1, 1), mask[:1])
    alone, _ = drafter.loss(first, base_weights)
    torch.testing.assert_close(both, alone)
