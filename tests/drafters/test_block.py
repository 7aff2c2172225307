"""The block drafter: training matches drafting, and its trees have the most probable paths."""

from itertools import product

import pytest
import torch
from torch.nn import functional as F

from drafters import Block, Limits
from drafters.block import cross_entropy
from drafters.losses import chunks
from drafters.losses.anchors import AnchoredFrames, LabelLossOptions
from drafters.nn.lookup import Passages
from drafters.nn.markov import Markov
from drafters.parallel import Roots
from tests.drafters.conftest import SHAPE, in_float64, random_drafter

S = 20


@pytest.fixture
def make():
    def made(**arguments):
        options = {"num_frames": 4, "num_nodes": 12, "top_k": 6} | arguments
        return random_drafter(Block, SHAPE, options, dtype=torch.float32)

    return made


def test_without_sampling_from_the_anchor_the_frames_after_the_first_predict(make, base_weights, text):
    """As in DFlash: of the same network the first frame's state is not read."""
    dspark, dflash, (hidden, ids) = make(), make(sample_from_anchor=False), text
    at = torch.tensor([[3, 9]])
    roots = dspark.roots(ids[None], at)
    whole, fewer = (drafter(hidden[None], roots, base_weights.embedding) for drafter in (dspark, dflash))
    assert fewer.shape[2] == dflash.num_labels == 3 and torch.equal(fewer, whole[:, :, 1:])
    (tree,) = dflash.draft_at(hidden, ids, torch.tensor([9]), base_weights)
    best = (fewer[0, 1] @ base_weights.head.T).argmax(-1).tolist()
    chain = make(sample_from_anchor=False, tree="chain", top_k=23)
    assert list(chain.draft_at(hidden, ids, torch.tensor([9]), base_weights)[0].tokens) == best
    assert max(tree.depths) <= 3 and len(tree) == 12


@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_a_frame_reads_the_token_of_a_passage_that_it_predicts(make, base_weights, text, sample_from_anchor):
    """In a causal block a token of the passage changes the states from its own frame on."""
    drafter = make(sample_from_anchor=sample_from_anchor, lookup=True, causal=True)
    (hidden, ids), at = text, torch.tensor([[9]])

    def states(tokens):
        passages = Passages(drafter.lookup, torch.tensor([[tokens]]), lengths=torch.tensor([[2]]))
        roots = Roots(at, ids[at], passages)
        return drafter(hidden[None], roots, base_weights.embedding)[0, 0]

    before = states([5, 6, 7, 8])
    for place in range(drafter.num_labels):
        changed = [5, 6, 7, 8]
        changed[place] = 9
        differs = (states(changed) != before).any(-1)
        assert differs.tolist() == [frame >= place for frame in range(drafter.num_labels)]


@pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"window": 4}, {"lookup": True, "copy": True}])
def test_a_batch_of_texts_gets_the_trees_that_each_gets_alone(make, base_weights, text, arguments):
    drafter, (hidden, ids), anchors = make(markov_rank=3, **arguments).double(), text, [1, 5, 19]
    base_weights = in_float64(base_weights)
    context = drafter.trunk.context(hidden.double().expand(3, -1, -1), torch.arange(S).expand(3, -1))
    texts, limits = [ids[: anchor + 1] for anchor in anchors], Limits(max_depth=100)
    trees = drafter.propose_batch(context, texts, base_weights, limits)
    assert trees == drafter.draft_at(hidden.double(), ids, torch.tensor(anchors), base_weights)
    for tree, anchor, tokens in zip(trees, anchors, texts, strict=True):
        before = [(keys[:1, :, :anchor], values[:1, :, :anchor]) for keys, values in context]
        assert drafter.propose_batch(before, [tokens], base_weights, limits) == [tree]


@pytest.mark.parametrize(("rank", "factors"), [(0, "own"), (3, "own"), (3, "base")])
def test_the_tree_has_the_most_probable_paths(make, base_weights, text, rank, factors):
    """The reference scores all paths over the full vocabulary by the product of the frames' probabilities."""
    drafter, (hidden, ids) = make(markov_rank=rank, markov_factors=factors, num_frames=2, top_k=23).double(), text
    base_weights = in_float64(base_weights)
    at = torch.tensor([[7]])
    with torch.no_grad():
        frames = drafter(hidden[None].double(), drafter.roots(ids[None], at), base_weights.embedding)[0, 0]
        logits = frames @ base_weights.head.T  # (2, V)
        bias = torch.zeros(23, 23, dtype=torch.float64)
        if rank:
            left, right = drafter.markov.factors(torch.arange(23), base_weights)
            bias = left @ right.T
        first = (logits[0] + bias[ids[7]]).softmax(-1)
        second = (logits[1] + bias).softmax(-1)  # (V, V): after each token
    paths = {(a,): first[a].item() for a in range(23)}
    paths |= {(a, b): (first[a] * second[a, b]).item() for a, b in product(range(23), repeat=2)}
    best = sorted(paths, key=paths.get, reverse=True)[:12]
    (tree,) = drafter.draft_at(hidden.double(), ids, at[0], base_weights)
    assert {tuple(tree.path_tokens(node)) for node in range(12)} == set(best)


# ---- the loss

A, T, U, V, D, R = 5, 4, 3, 7, 6, 2
VALID = torch.arange(U) < torch.tensor([3, 2, 0, 1, 3])[:, None]


class Case:
    def __init__(self, has_bias):
        generator = torch.Generator().manual_seed(0)

        def draw(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.frames, self.head = draw(A, T, D), draw(V, D)
        self.labels, self.roots = (torch.randint(V, shape, generator=generator) for shape in ((A, U), (A,)))
        self.markov, self.leaves = None, [self.frames.requires_grad_()]
        if has_bias:
            self.markov = Markov(V, R, V).double()
            for weight in self.markov.parameters():
                weight.data = draw(*weight.shape)
            self.leaves += [*self.markov.parameters()]

    def loss(self, valid=VALID, copies=(), **options):
        previous, left, right = torch.cat([self.roots[:, None], self.labels], 1), None, None
        if self.markov is not None:
            left, right = self.markov.factors(previous)
        anchored = AnchoredFrames(self.frames, self.labels, valid, left, *copies)
        return cross_entropy(anchored, self.head, right, LabelLossOptions(**options))

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
def test_with_copies_a_label_has_its_probability_given_the_labels_before(has_bias):
    case = Case(has_bias)
    copied = torch.arange(U) < torch.arange(A)[:, None] % (U + 1)
    logits = torch.linspace(-2, 3, A, dtype=torch.float64, requires_grad=True)
    loss, metrics = case.loss(copies=(copied, logits), decay=0.6)
    token = case.log_distributions().gather(-1, case.labels[..., None])[..., 0]
    share = logits.sigmoid()[:, None]
    prefix = torch.cat([torch.ones(A, 1), (1 - share) * token.exp().cumprod(-1) + share * copied], 1)
    weights = VALID * torch.tensor([1, 0.6, 0.36], dtype=torch.float64)
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
    expected = -(weights * (prefix[:, 1:] / prefix[:, :-1]).log()).sum() / 4
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(metrics["expected_acceptance"], (prefix[:, 1:] * VALID).sum().detach() / 4)
    leaves = [*case.leaves, logits]
    torch.testing.assert_close(*(torch.autograd.grad(x, leaves) for x in (loss, expected)), rtol=0, atol=1e-12)


@has_bias
@pytest.mark.parametrize("max_bytes", [1, 8 * 40 * V, 2**20], ids=["one", "some", "all"])
def test_loss_and_gradients_equal_those_of_a_literal_mean(has_bias, monkeypatch, max_bytes):
    monkeypatch.setattr(chunks, "MAX_BYTES", max_bytes)
    case = Case(has_bias)
    loss, _ = case.loss(decay=0.6)
    log_distributions = case.log_distributions()
    cost = F.nll_loss(log_distributions.flatten(0, 1), case.labels.flatten(), reduction="none").view(A, U)
    weights = VALID * torch.tensor([1, 0.6, 0.36], dtype=torch.float64)
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
    expected = (weights * cost).sum() / 4
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(3 * x, case.leaves) for x in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@has_bias
@pytest.mark.parametrize("max_bytes", [1, 2**20])
def test_the_metric_is_the_mean_expected_acceptance(has_bias, monkeypatch, max_bytes):
    monkeypatch.setattr(chunks, "MAX_BYTES", max_bytes)
    case = Case(has_bias)
    _, numbers = case.loss()
    torch.testing.assert_close(numbers["expected_acceptance"], case.reached().sum(-1)[VALID[:, 0]].mean().detach())
