"""The CTC losses, against a literal sum over every alignment in float64."""

from itertools import product

import pytest
import torch

from drafters import TrainingBatch
from drafters.ctc.alignment import collapse, states
from drafters.ctc.emissions import emit, next_token_probs
from drafters.ctc.loss import BlankOutput, CTCLossOptions, ctc_loss
from drafters.losses.anchors import AnchoredFrames
from drafters.losses.chunks import MAX_BYTES
from drafters.nn.markov import Markov
from train.memory import LiveBytes

T, V, U, D, R, BLANK = 5, 3, 3, 4, 2, 3
ALIGNMENTS = torch.tensor(list(product(range(V + 1), repeat=T)))
TEXTS = [tuple(collapse(alignment, BLANK)) for alignment in ALIGNMENTS]
LABELS = torch.tensor([[0, 1, 2], [1, 1, 0], [2, 2, 2], [0, 1, 0], [2, 0, 0], [1, 2, 1]])
LENGTHS = torch.tensor([3, 3, 3, 2, 0, 1])
ROOTS = torch.tensor([0, 2, 2, 1, 1, 0])  # anchors 0 and 2 have their root as first label, the others do not
A = len(LABELS)
VALID = torch.arange(U) < LENGTHS[:, None]


def last_emitted(root):
    """(N, T) last label emitted before each frame, for every alignment."""
    rows = []
    for alignment in ALIGNMENTS.tolist():
        row, last = [], root
        for symbol in alignment:
            row.append(last)
            last = last if symbol == BLANK else symbol
        rows.append(row)
    return torch.tensor(rows)


class Case:
    """Six anchors, their weights, and a literal loss from softmax, alignments and products."""

    def __init__(self, has_bias, num_frames=T):
        generator = torch.Generator().manual_seed(0)

        def draw(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.frames, self.head, self.teacher = draw(A, T, D), draw(V, D), draw(A, U, D)
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

    def loss(self, teacher=None, teacher_valid=None, warm_up=0.0, max_bytes=MAX_BYTES, **options):
        anchored = AnchoredFrames(self.frames, LABELS, VALID, ROOTS, teacher, teacher_valid)
        return self.loss_of(anchored, warm_up, max_bytes, **options)

    def loss_of(self, anchored, warm_up=0.0, max_bytes=MAX_BYTES, **options):
        blank, settings = BlankOutput(self.blank_row, self.blank_bias), {"warm_up": warm_up, "max_bytes": max_bytes}
        bias = self.markov and self.markov.factors(anchored.previous)
        return ctc_loss(anchored, self.head, blank, bias, CTCLossOptions(**options), **settings)

    def log_distributions(self, anchor):
        """(T, V, V + 1) log-probabilities of each frame after each last emitted label."""
        frames = self.frames[anchor]
        logits = torch.cat([frames @ self.head.T, (frames @ self.blank_row + self.blank_bias)[:, None]], 1)
        bias = torch.zeros(V, V + 1) if self.markov is None else self.markov(torch.arange(V))
        return (logits[:, None] + bias).log_softmax(-1)

    def texts(self, anchor):
        """Return the probability that the text begins with some tokens, or that it equals them."""
        root = int(ROOTS[anchor])
        each = self.log_distributions(anchor)[torch.arange(T), last_emitted(root), ALIGNMENTS].sum(1).exp()

        def probability(tokens, whole=False):
            tokens = tuple(tokens)
            return each[
                torch.tensor([text == tokens or (not whole and text[: len(tokens)] == tokens) for text in TEXTS])
            ].sum()

        return probability

    def base_probs(self, anchor, temperature):
        """(U, V) the base's distribution of each label."""
        scores = self.teacher[anchor] @ self.head.T
        if temperature == 0:
            return torch.nn.functional.one_hot(scores.argmax(-1), V).double()
        return (scores / temperature).softmax(-1)

    def written_out(
        self,
        objective="prefix",
        weights="decay",
        decay=0.9,
        warm_up=0.0,
        label_weight=1.0,
        distillation=0.0,
        divergence="kl",
        teacher_temperature=1.0,
    ):
        total = 0.0
        for anchor in range(A):
            label, probability = LABELS[anchor, : LENGTHS[anchor]].tolist(), self.texts(anchor)
            prefix = [probability(label[:n]) for n in range(1, len(label) + 1)]
            prefix = [p for p in prefix if p > 0]
            factor = torch.tensor([decay**u for u in range(len(prefix))], dtype=torch.float64)
            if weights == "survival":
                factor = torch.tensor([p.item() for p in prefix], dtype=torch.float64)
            factor = factor / factor.sum()
            loss = torch.zeros((), dtype=torch.float64)
            if objective == "prefix":
                loss = loss - sum(w * p.log() for w, p in zip(factor, prefix, strict=True))
            elif label and (whole := probability(label, whole=True)) > 0:
                loss = loss - whole.log() / len(label)
            loss = label_weight * loss
            if distillation:
                base = self.base_probs(anchor, teacher_temperature)
                for u, w in enumerate(factor):
                    begins = [tuple(label[:u])] + [(*label[:u], v) for v in range(V)]
                    reach, *nexts = (probability(g) for g in begins)
                    q = torch.stack(nexts) / reach
                    loss = loss + distillation * w * literal_divergence(divergence, base[u], q)
            if warm_up:
                distributions, before = self.log_distributions(anchor), [int(ROOTS[anchor]), *label]
                share = torch.tensor([decay**u for u in range(len(label))], dtype=torch.float64)
                plain = -sum(w * distributions[u, before[u], label[u]] for u, w in enumerate(share / share.sum()))
                loss = (1 - warm_up) * loss + warm_up * plain
            total = total + loss
        return total / (LENGTHS > 0).sum()


def literal_divergence(kind, base, draft):
    kl = sum(p * (p.log() - (q.log() if q > 0 else -60)) for p, q in zip(base, draft, strict=True) if p > 0)
    accepted = sum(min(p, q) for p, q in zip(base, draft, strict=True))
    share = torch.exp(-3 * accepted.detach())
    return {
        "kl": kl,
        "tv": 1 - accepted,
        "lk": -accepted.log(),
        "lk_hybrid": share * kl + (1 - share) * (1 - accepted),
    }[kind]


has_bias = pytest.mark.parametrize("has_bias", [False, True], ids=["frame distributions", "Markov bias"])


@has_bias
@pytest.mark.parametrize("max_bytes", [1, 4 * 60 * V, 2**20], ids=["one", "some", "all"])
@pytest.mark.parametrize(
    "settings",
    [
        {"objective": "ctc"},
        {"objective": "prefix", "decay": 0.6},
        {"weights": "survival"},
        {"warm_up": 1.0},
        {"warm_up": 0.3, "objective": "ctc"},
        {"distillation": 0.5},
        {"distillation": 2.0, "weights": "survival", "warm_up": 0.2, "objective": "ctc"},
    ],
    ids=str,
)
def test_loss_and_gradients_equal_those_of_the_literal_sum(has_bias, settings, max_bytes):
    assert_literal(has_bias, settings, max_bytes)


@has_bias
@pytest.mark.parametrize(
    "settings",
    [
        {"distillation": 0.5, "divergence": "tv", "teacher_temperature": 0.5, "label_weight": 0.3},
        {"distillation": 1.0, "divergence": "lk", "label_weight": 0.0, "weights": "survival"},
        {"distillation": 1.5, "divergence": "lk_hybrid", "teacher_temperature": 0.0, "label_weight": 0.2},
    ],
    ids=str,
)
def test_losses_of_the_acceptance_and_their_gradients_equal_those_of_the_literal_sum(has_bias, settings):
    assert_literal(has_bias, settings, max_bytes=4 * 60 * V)


def assert_literal(has_bias, settings, max_bytes):
    case = Case(has_bias)
    teacher = {"teacher": case.teacher} if "distillation" in settings else {}
    ours, expected = case.loss(max_bytes=max_bytes, **teacher, **settings)[0], case.written_out(**settings)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(3 * loss, case.leaves) for loss in (ours, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-11)


@has_bias
def test_survival_weights_follow_the_gradient_of_the_expected_acceptance(has_bias):
    """For each anchor it is the gradient of -sum_u P(text begins with y_1..y_u), divided by that sum."""
    case = Case(has_bias)
    expected = 0.0
    for anchor, length in enumerate(LENGTHS.tolist()):
        probability, label = case.texts(anchor), tuple(LABELS[anchor].tolist())
        accepted = [probability(label[:n]) for n in range(1, length + 1)]
        if accepted:
            expected = expected - sum(accepted) / sum(accepted).detach()
    ours, _ = case.loss(weights="survival")
    gradients = [torch.autograd.grad(x, case.leaves) for x in (ours, expected / (LENGTHS > 0).sum())]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@has_bias
def test_the_metrics_are_the_mean_blank_share_and_the_mean_expected_acceptance(has_bias):
    case = Case(has_bias)
    blank, acceptance = [], []
    for anchor, length in enumerate(LENGTHS.tolist()):
        probability, label = case.texts(anchor), tuple(LABELS[anchor].tolist())
        if length:
            blank.append(case.log_distributions(anchor)[:, ROOTS[anchor], BLANK].exp().mean())
            acceptance.append(sum(probability(label[:n]) for n in range(1, length + 1)))
    for max_bytes in (1, 2**20):
        _, numbers = case.loss(max_bytes=max_bytes)
        assert not any(number.requires_grad for number in numbers.values())
        torch.testing.assert_close(numbers["blank_share"], torch.stack(blank).mean())
        torch.testing.assert_close(numbers["expected_acceptance"], torch.stack(acceptance).mean())


@has_bias
@pytest.mark.parametrize("divergence", ["kl", "tv", "lk"])
def test_the_gradient_of_distillation_equals_finite_differences(has_bias, divergence):
    case = Case(has_bias)
    settings = {"teacher": case.teacher, "label_weight": 0.0, "distillation": 1.0, "divergence": divergence}
    assert torch.autograd.gradcheck(lambda *_: case.loss(**settings)[0], case.leaves, fast_mode=True)


@pytest.mark.parametrize("divergence", ["kl", "lk_hybrid"])
def test_a_distilled_loss_keeps_to_the_memory_of_a_chunk(divergence):
    """Eight anchors of 2,000 tokens: all at once take twice the memory that a chunk of three may take."""
    num_tokens, generator = 2000, torch.Generator().manual_seed(0)
    frames, teacher, head, row = (
        torch.randn(*shape, D, generator=generator).requires_grad_() for shape in ((8, T), (8, U), (num_tokens,), ())
    )
    labels, markov = torch.randint(num_tokens, (8, U), generator=generator), Markov(num_tokens, R, num_tokens + 1)
    anchored = AnchoredFrames(frames, labels, torch.ones(8, U, dtype=torch.bool), labels[:, 0], teacher.detach())
    blank, bias = BlankOutput(row, torch.zeros((), requires_grad=True)), markov.factors(anchored.previous)
    options = CTCLossOptions(distillation=1.0, divergence=divergence)
    peaks = []
    for max_bytes in (2**20, 2**30):
        with LiveBytes(frames, teacher, head, row, *bias) as live:
            ctc_loss(anchored, head, blank, bias, options, max_bytes=max_bytes)
        peaks.append(live.peak)
    assert peaks[0] < 2**20 < peaks[1] / 1.5


@has_bias
def test_the_next_token_distribution_is_that_of_all_alignments(has_bias):
    """And what it lacks to one is the probability that the draft stops."""
    case = Case(has_bias)
    previous = torch.cat([ROOTS[:, None], LABELS], 1)
    left, right = (None, None) if case.markov is None else case.markov.factors(previous)
    with torch.no_grad():
        emissions = emit(case.frames.clone(), LABELS, case.head, case.blank_row, case.blank_bias, left, right)
        reached = states(emissions.enter, emissions.stay, emissions.blank, LABELS)
        q = next_token_probs(emissions, reached, LABELS)
        for anchor in range(A):
            probability, label = case.texts(anchor), LABELS[anchor].tolist()
            for u in range(U):
                reach, stop = probability(label[:u]), probability(label[:u], whole=True)
                expected = torch.stack([probability([*label[:u], token]) for token in range(V)]) / reach
                torch.testing.assert_close(q[anchor, u], expected, rtol=0, atol=1e-13)
                torch.testing.assert_close(q[anchor, u].sum(), 1 - stop / reach, rtol=0, atol=1e-13)


def test_total_variation_is_zero_where_the_draft_is_the_base_and_never_above_one():
    """Frames with the base's own states, without a blank: the first frame says what the base says."""
    case = Case(False)
    case.frames.data[:, 0], case.blank_row.data[:], case.blank_bias.data[()] = case.teacher[:, 0], 0.0, -1e9
    first = torch.arange(U) < 1
    settings = {"teacher": case.teacher, "label_weight": 0.0, "distillation": 1.0, "divergence": "tv"}
    assert case.loss(teacher_valid=first & VALID, **settings)[0].item() == pytest.approx(0, abs=1e-12)
    case.frames.data *= 1000  # certain of one token, which the base's distribution is not
    assert 0.1 < case.loss(**settings)[0].item() < 1


@has_bias
def test_positions_without_a_teacher_are_not_distilled(has_bias):
    case = Case(has_bias)
    settings = {"teacher": case.teacher, "distillation": 1.0}
    taught = torch.zeros_like(VALID)
    taught[:, 0] = True
    none, first, every = (
        case.loss(teacher_valid=known, **settings)[0].item() for known in (taught & False, taught, None)
    )
    assert none == pytest.approx(case.loss()[0].item(), abs=1e-12)
    assert none < first < every


@has_bias
def test_invalid_labels_are_ignored(has_bias, monkeypatch):
    case = Case(has_bias)
    settings = {"warm_up": 0.5, "distillation": 1.0, "teacher": case.teacher}
    expected, _ = case.loss(**settings)
    monkeypatch.setitem(globals(), "LABELS", torch.where(VALID, LABELS, (LABELS + 1) % V))
    torch.testing.assert_close(case.loss(**settings)[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("objective", ["ctc", "prefix"])
@has_bias
def test_without_labels_the_loss_is_zero_and_every_weight_has_a_gradient_of_zero(has_bias, objective, monkeypatch):
    case = Case(has_bias)
    monkeypatch.setitem(globals(), "VALID", VALID & False)
    settings = {"warm_up": 0.5, "distillation": 1.0, "teacher": case.teacher}
    loss, numbers = case.loss(objective=objective, **settings)
    assert loss.item() == numbers["blank_share"].item() == numbers["expected_acceptance"].item() == 0
    assert all(gradient.eq(0).all() for gradient in torch.autograd.grad(loss, case.leaves))


@pytest.mark.parametrize("objective", ["ctc", "prefix"])
@has_bias
def test_labels_without_an_alignment_add_nothing(has_bias, objective):
    """Three frames can emit y y but not y y y."""
    case = Case(has_bias)
    short, roots = [case.frames[:2, :3], torch.tensor([[1, 1, 1], [1, 2, 0]])], torch.tensor([0, 0])
    all_valid, two_valid = torch.ones(2, 3, dtype=torch.bool), torch.tensor([[True, True, False], [True] * 3])
    loss, _ = case.loss_of(AnchoredFrames(*short, all_valid, roots), objective=objective)
    gradients = torch.autograd.grad(loss, case.leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)
    if objective == "ctc":
        assert gradients[0][0].eq(0).all()
        assert loss > 0
    else:
        expected, _ = case.loss_of(AnchoredFrames(*short, two_valid, roots), objective=objective)
        torch.testing.assert_close(loss, expected)


@has_bias
def test_a_token_that_the_frames_cannot_emit_has_a_finite_divergence(has_bias):
    """In four frames 1 1 can be followed by 0 but not by a third 1, to which the base gives some probability."""
    case = Case(has_bias)
    labels, valid = torch.tensor([[1, 1, 0]]), torch.ones(1, 3, dtype=torch.bool)
    anchored = AnchoredFrames(case.frames[:1, :4], labels, valid, torch.tensor([0]), case.teacher[:1])
    plain, _ = case.loss_of(anchored, weights="survival")
    loss, _ = case.loss_of(anchored, weights="survival", distillation=1.0)
    assert plain < loss < plain + 60
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, case.leaves))


@has_bias
@pytest.mark.parametrize("head_dtype", [torch.float32, torch.bfloat16])
def test_half_precision_affects_products_but_not_sums(has_bias, head_dtype):
    """With bfloat16 frames under autocast, sums over thousands of tokens still equal those in float64."""
    generator = torch.Generator().manual_seed(0)
    num_tokens, anchors = 4000, 5
    head = torch.randn(num_tokens, D, generator=generator)
    frames = torch.randn(anchors, T, D, generator=generator).bfloat16()
    labels, roots = torch.randint(num_tokens, (anchors, U), generator=generator), torch.arange(anchors)
    blank, markov = (torch.randn(D, generator=generator), torch.tensor(-1.0)), None
    if has_bias:
        markov = Markov(num_tokens, R, num_tokens + 1)
        torch.nn.init.normal_(markov.right, std=0.1)
    valid = torch.ones_like(labels, dtype=torch.bool)
    anchored, wide = AnchoredFrames(frames, labels, valid, roots), AnchoredFrames(frames.double(), labels, valid, roots)
    wide_blank = BlankOutput(*(x.double() for x in blank))
    exact, _ = ctc_loss(wide, head.to(head_dtype).double(), wide_blank, markov and markov.factors(wide.previous))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, _ = ctc_loss(
            anchored, head.to(head_dtype), BlankOutput(*blank), markov and markov.factors(anchored.previous)
        )
    assert ours.dtype == torch.float32
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[head_dtype]
    torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "plain"}, "objective"),
        ({"weights": "even"}, "weights"),
        ({"warm_up": 1.5}, "warm_up"),
        ({"distillation": 0.1}, "teacher"),
        ({"divergence": "js"}, "divergence"),
        ({"label_weight": 0.0}, "label_weight"),
        ({"max_bytes": 0}, "max_bytes"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Case(False).loss(**settings)


def test_a_bias_without_a_column_for_the_blank_is_refused():
    case = Case(False)
    case.markov = Markov(V, R, V)
    with pytest.raises(ValueError, match="4 columns"):
        case.loss()


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


@pytest.mark.parametrize("objective", ["ctc", "prefix"])
def test_a_batch_without_anchors_has_a_finite_loss_with_a_gradient_for_every_weight(make_ctc, base_weights, objective):
    drafter = make_ctc(objective=objective, num_layers=2, hidden_layers=[1, -1])
    hidden, ids = torch.randn(2, 8, 32), torch.randint(0, 23, (2, 8))
    nothing = torch.zeros(2, 8, dtype=torch.bool)
    loss, _ = drafter.loss(TrainingBatch(hidden, hidden[..., :16], ids, ids, nothing), base_weights)
    loss.backward()
    assert loss.item() == 0
    for name, weight in drafter.named_parameters():
        assert weight.grad is not None, f"{name} has no gradient: data-parallel training would wait for it"
        assert weight.grad.isfinite().all()
