"""Cross-entropy in chunks, against a literal version with the full softmax in float64."""

import pytest
import torch
from torch.nn import functional as F

from drafters.losses.anchors import AnchoredFrames
from drafters.losses.chunks import MAX_BYTES
from drafters.losses.cross_entropy import cross_entropy
from drafters.losses.label_weights import LabelLossOptions
from drafters.nn.markov import Markov

A, T, U, V, D, R = 5, 4, 3, 7, 6, 2
VALID = torch.arange(U) < torch.tensor([3, 2, 0, 1, 3])[:, None]


class Case:
    def __init__(self, has_bias):
        generator = torch.Generator().manual_seed(0)

        def draw(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.frames, self.head, self.teacher = draw(A, T, D), draw(V, D), draw(A, U, D)
        self.labels, self.roots = (torch.randint(V, shape, generator=generator) for shape in ((A, U), (A,)))
        self.markov, self.leaves = None, [self.frames.requires_grad_()]
        if has_bias:
            self.markov = Markov(V, R, V).double()
            for weight in self.markov.parameters():
                weight.data = draw(*weight.shape)
            self.leaves += [*self.markov.parameters()]

    def loss(self, valid=VALID, teacher=None, teacher_valid=None, max_bytes=MAX_BYTES, **options):
        anchored = AnchoredFrames(self.frames, self.labels, valid, self.roots, teacher, teacher_valid)
        bias = self.markov and self.markov.factors(anchored.previous)
        return cross_entropy(anchored, self.head, bias, LabelLossOptions(**options), max_bytes)

    def log_distributions(self):
        logits = self.frames[:, :U] @ self.head.T
        if self.markov is not None:
            logits = logits + self.markov(torch.cat([self.roots[:, None], self.labels[:, :-1]], 1))
        return logits.log_softmax(-1)

    def reached(self):
        """(A, U) p_1(y_1) ... p_u(y_u), zero beyond the valid labels."""
        token = self.log_distributions().gather(-1, self.labels[..., None])[..., 0]
        return token.cumsum(-1).exp() * VALID


has_bias = pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "Markov bias"])


@has_bias
@pytest.mark.parametrize("max_bytes", [1, 4 * 40 * V, 2**20], ids=["one", "some", "all"])
@pytest.mark.parametrize(("distillation", "kind"), [(0.0, "kl"), (0.7, "kl"), (0.7, "tv"), (0.7, "lk")])
def test_loss_and_gradients_equal_those_of_a_literal_mean(has_bias, max_bytes, distillation, kind):
    case = Case(has_bias)
    settings = {"decay": 0.6, "distillation": distillation, "divergence": kind, "label_weight": 0.4}
    settings |= {"teacher_temperature": 0.5} if distillation else {}
    ours, _ = case.loss(teacher=case.teacher, max_bytes=max_bytes, **settings)
    log_distributions = case.log_distributions()
    cost = F.nll_loss(log_distributions.flatten(0, 1), case.labels.flatten(), reduction="none").view(A, U)
    base = (2 * case.teacher @ case.head.T).log_softmax(-1)
    distance = (base.exp() - log_distributions.exp()).abs().sum(-1) / 2
    if kind == "kl":
        distance = F.kl_div(log_distributions, base, reduction="none", log_target=True).sum(-1)
    elif kind == "lk":
        distance = -(1 - distance).log()
    cost = 0.4 * cost + distillation * distance
    weights = VALID * torch.tensor([1, 0.6, 0.36], dtype=torch.float64)
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
    expected = (weights * cost).sum() / 4
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(3 * x, case.leaves) for x in (ours, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@has_bias
def test_survival_weights_follow_the_gradient_of_the_expected_acceptance(has_bias):
    """For each anchor it is the gradient of -sum_u p_1 ... p_u, divided by that sum."""
    case = Case(has_bias)
    accepted = case.reached().sum(-1)[VALID[:, 0]]
    ours, _ = case.loss(weights="survival")
    expected = -(accepted / accepted.detach()).mean()
    gradients = [torch.autograd.grad(x, case.leaves) for x in (ours, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@has_bias
@pytest.mark.parametrize("max_bytes", [1, 2**20])
def test_the_metric_is_the_mean_expected_acceptance(has_bias, max_bytes):
    case = Case(has_bias)
    _, numbers = case.loss(max_bytes=max_bytes)
    torch.testing.assert_close(numbers["expected_acceptance"], case.reached().sum(-1)[VALID[:, 0]].mean().detach())


@has_bias
@pytest.mark.parametrize("weights", ["decay", "survival"])
def test_without_labels_the_loss_is_zero_and_every_weight_has_a_gradient_of_zero(has_bias, weights):
    case = Case(has_bias)
    loss, numbers = case.loss(valid=VALID & False, weights=weights, distillation=1.0, teacher=case.teacher)
    assert loss.item() == numbers["expected_acceptance"].item() == 0
    assert all(gradient.eq(0).all() for gradient in torch.autograd.grad(loss, case.leaves))


def test_positions_without_a_teacher_are_not_distilled():
    case = Case(False)
    settings = {"teacher": case.teacher, "distillation": 1.0}
    torch.testing.assert_close(case.loss(teacher_valid=VALID & False, **settings)[0], case.loss()[0])


@pytest.mark.parametrize(
    ("settings", "message"), [({"weights": "even"}, "weights"), ({"distillation": 0.1}, "teacher")], ids=str
)
def test_invalid_arguments_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Case(False).loss(**settings)


def test_too_few_frames_and_a_bias_of_the_wrong_width_are_refused():
    case = Case(True)
    case.frames = case.frames[:, :2]
    with pytest.raises(ValueError, match="2 frames"):
        case.loss()
    case = Case(False)
    case.markov = Markov(V, R, V + 1)
    with pytest.raises(ValueError, match="7 columns"):
        case.loss()


@pytest.mark.parametrize("unused", [{"divergence": "tv"}, {"teacher_temperature": 0.0}])
def test_options_of_distillation_are_refused_without_it(unused):
    with pytest.raises(ValueError, match="belong to distillation, which is 0: raise it"):
        LabelLossOptions(**unused)
