"""CTC whose equal neighbours are not merged: loss, searches and samples, against one enumeration of every alignment."""

from collections import defaultdict
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from drafters import Limits
from drafters.ctc import biased_chain, fixed_search, prefix_search
from drafters.ctc.alignment import IMPOSSIBLE, collapse, prefix_log_probs, states
from drafters.ctc.distributions import FrameDistributions, next_token_distribution, spell, stop_probability
from drafters.ctc.emissions import emit, next_token_probs
from drafters.ctc.loss import BlankOutput, CTCLossOptions, ctc_loss
from drafters.ctc.sampled_tree import draw
from drafters.losses.anchors import AnchoredFrames
from drafters.nn.markov import Markov
from drafters.trees.best_first import Bias

T, V, BLANK, ROOT_TOKEN, R, D = 4, 3, 3, 1, 2, 4
LABELS = [[0, 1, 2, 0], [1, 1, 1, 1], [2, 2, 0, 0], [0, 0, 1, 1]]


class Draft:
    """Frames with a bias given the last emitted token, and the exact probabilities of their texts."""

    def __init__(self, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.frames, self.head, self.blank_row = (
            torch.randn(*shape, generator=generator, dtype=torch.float64) * 1.5 for shape in ((T, D), (V, D), (D,))
        )
        self.blank_bias = torch.tensor(-0.5, dtype=torch.float64)
        self.markov = Markov(V, R, V + 1).double()
        for weight in self.markov.parameters():
            weight.data = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        self.leaves = [self.frames, self.blank_row, self.blank_bias, *self.markov.parameters()]
        for leaf in self.leaves:
            leaf.requires_grad_()

    @property
    def logits(self):
        """(T, V + 1), the blank last."""
        return torch.cat([self.frames @ self.head.T, (self.frames @ self.blank_row + self.blank_bias)[:, None]], 1)

    def texts(self):
        """By text, P(the text begins with it), and P(it is the text)."""
        begins, whole = defaultdict(float), defaultdict(float)
        table = (self.logits[:, None] + self.markov(torch.arange(V))).log_softmax(-1).exp()  # (T, V, V + 1)
        for alignment in product(range(V + 1), repeat=T):
            text, last, probability = [], ROOT_TOKEN, 1.0
            for frame, symbol in enumerate(alignment):
                probability = probability * table[frame, last, symbol]
                if symbol != BLANK:
                    text.append(symbol)
                    last = symbol
            assert collapse(torch.tensor(alignment), BLANK, merge_repeats=False) == text
            whole[tuple(text)] += probability
            for length in range(len(text) + 1):
                begins[tuple(text[:length])] += probability
        return begins, whole

    def columns(self, labels):
        """`enter`, `stay` and `blank` of labels (A, U), as `prefix_log_probs` takes them."""
        previous = torch.cat([torch.full_like(labels[:, :1], ROOT_TOKEN), labels], 1)
        frames = self.frames.expand(len(labels), -1, -1)
        emissions = emit(frames, labels, self.head, self.blank_row, self.blank_bias, *self.markov.factors(previous))
        return emissions, (emissions.enter, emissions.stay, emissions.blank)


@pytest.mark.parametrize("label", LABELS, ids=str)
def test_probabilities_and_gradients_equal_the_literal_sum(label):
    draft = Draft()
    begins, whole = draft.texts()
    assert begins[()].item() == pytest.approx(1, abs=1e-12)
    labels, lengths = torch.tensor([label]), range(1, T + 1)
    exact, prefix = prefix_log_probs(*draft.columns(labels)[1], labels, merge_repeats=False)
    ours = torch.cat([exact[0, 1:], prefix[0]])
    expected = torch.stack([found[tuple(label[:length])].log() for found in (whole, begins) for length in lengths])
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    upstream = torch.randn(len(ours), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    got, wanted = (torch.autograd.grad(upstream @ x, draft.leaves) for x in (ours, expected))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


def test_merging_could_not_reach_labels_that_repeat_in_as_many_frames():
    labels = torch.tensor([[1, 1, 1, 1]])
    assert prefix_log_probs(*Draft().columns(labels)[1], labels)[1][0, 2] <= IMPOSSIBLE / 2


@torch.no_grad()
def test_the_next_token_has_the_distribution_of_all_alignments():
    draft, labels = Draft(), torch.tensor(LABELS)
    begins, whole = draft.texts()
    emissions, columns = draft.columns(labels)
    q = next_token_probs(emissions, states(*columns, labels, merge_repeats=False), labels, merge_repeats=False)
    texts = sorted(begins, key=len)[: 1 + V + V**2 + V**3]  # a fifth token does not fit
    tokens = torch.tensor([text[-1] if text else ROOT_TOKEN for text in texts])
    parents = torch.tensor([texts.index(text[:-1]) if text else -1 for text in texts])
    frames = FrameDistributions(draft.logits, draft.markov(tokens))
    prefixes = spell(frames, tokens, parents, merge_repeats=False)
    distribution = next_token_distribution(frames, prefixes)
    for place, text in enumerate(texts):
        after = torch.stack([begins[(*text, token)] / begins[text] for token in range(V)])
        torch.testing.assert_close(distribution[place], after, rtol=0, atol=1e-12)
        stop = float(whole[text] / begins[text])
        assert float(stop_probability(prefixes)[place]) == pytest.approx(stop, abs=1e-12)
        assert float(prefixes.probs[place]) == pytest.approx(float(begins[text]), abs=1e-12)
        for anchor, label in enumerate(LABELS):
            if tuple(label[: len(text)]) == text:
                torch.testing.assert_close(q[anchor, len(text)], after, rtol=0, atol=1e-12)


def test_the_loss_is_that_of_the_literal_prefixes_and_its_teacher():
    draft = Draft()
    begins, _ = draft.texts()
    labels, roots = torch.tensor(LABELS), torch.full((len(LABELS),), ROOT_TOKEN)
    teacher = torch.randn(len(LABELS), T, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    anchored = AnchoredFrames(
        draft.frames.expand(len(LABELS), -1, -1), labels, torch.ones_like(labels, dtype=torch.bool), roots, teacher
    )
    options = CTCLossOptions(num_labels=T, decay=0.8, distillation=1.0)
    blank, bias = BlankOutput(draft.blank_row, draft.blank_bias), draft.markov.factors(anchored.previous)
    loss, metrics = ctc_loss(anchored, draft.head, blank, bias, options, merge_repeats=False)
    weights = 0.8 ** torch.arange(T).double()
    weights = weights / weights.sum()
    expected, acceptance = 0.0, 0.0
    for anchor, label in enumerate(LABELS):
        for u in range(T):
            here = begins[tuple(label[: u + 1])]
            base = (teacher[anchor, u] @ draft.head.T).softmax(-1)
            q = torch.stack([begins[(*label[:u], token)] for token in range(V)]) / begins[tuple(label[:u])]
            expected = expected + weights[u] * (-here.log() + (base * (base.log() - q.log())).sum())
            acceptance += here.item()
    torch.testing.assert_close(loss, expected / len(LABELS), rtol=0, atol=1e-10)
    assert float(metrics["expected_acceptance"]) == pytest.approx(acceptance / len(LABELS), abs=1e-10)
    got, wanted = (torch.autograd.grad(x, draft.leaves, retain_graph=True) for x in (loss, expected / len(LABELS)))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-9)


def paths(tree, probs):
    return {tuple(tree.path_tokens(node)): float(probs[node]) for node in range(len(tree))}


@pytest.mark.parametrize("num_nodes", [1, 5, 12, 200])
@pytest.mark.parametrize("seed", range(3))
@torch.no_grad()
def test_all_searches_find_the_most_probable_prefixes(num_nodes, seed):
    draft = Draft(seed)
    begins = {text: float(p) for text, p in draft.texts()[0].items() if text}
    best = dict(sorted(begins.items(), key=lambda pair: -pair[1])[:num_nodes])
    logits, table = draft.logits, draft.markov(torch.arange(V))
    frames = logits.softmax(-1)
    factors = torch.cat([table, table[ROOT_TOKEN][None]]).softmax(-1)  # the root's row last
    scales = 1 / (factors @ frames.T)
    bias, given = Bias(factors.numpy(), scales.numpy()), (frames[:, :V].numpy(), frames[:, V].numpy(), np.arange(V))
    tree, probs = prefix_search.search(*given, num_nodes, T, bias=bias, merge_repeats=False)
    assert paths(tree, probs) == pytest.approx(best, abs=1e-12)
    assert num_nodes < 200 or (2, 2, 2, 2) in paths(tree, probs)

    on_device = [frames[:, :V].contiguous(), frames[:, V].contiguous(), torch.arange(V), num_nodes, torch.tensor(T)]
    nothing = torch.zeros(0, dtype=torch.long)
    biases = {"factors": factors, "scales": scales, "merge_repeats": False}
    assert fixed_search.search(*on_device, nothing, **biases).on_host() == tree

    chain, chain_probs = prefix_search.chain(*given, T, T, bias=bias, merge_repeats=False)
    expected, path = {}, ()
    while len(path) < T:
        path = max((text for text in begins if text[:-1] == path), key=begins.get)
        expected[path] = begins[path]
    assert paths(chain, chain_probs) == pytest.approx(expected, abs=1e-12)
    assert fixed_search.search(*on_device[:3], T, torch.tensor(T), nothing, **biases, is_chain=True).on_host() == chain
    roots, candidates = torch.tensor([ROOT_TOKEN]), torch.arange(V)[None]
    found = biased_chain.chains(logits[None], roots, candidates, draft.markov, T, merge_repeats=False)
    assert found.tokens[0].tolist() == chain.tokens
    np.testing.assert_allclose(found.probs[0].numpy(), chain_probs, rtol=0, atol=1e-12)


@torch.no_grad()
def test_sampled_texts_keep_equal_neighbours_and_have_the_distribution_of_their_nodes():
    draft = Draft()
    begins, whole = draft.texts()
    generator = np.random.default_rng(0)
    tree = draw(draft.logits, draft.markov, ROOT_TOKEN, 400, 999, 99, (), generator, merge_repeats=False)
    texts = {tuple(tree.path_tokens(node)) for node in range(len(tree))}
    assert any(a == b for text in texts for a, b in pairwise(text))
    for distribution in tree.distributions:
        prefix = tuple(tree.path_tokens(distribution.parent))
        goes_on = begins[prefix] - whole[prefix]
        expected = torch.stack([begins[(*prefix, token)] / goes_on for token in range(V)])
        torch.testing.assert_close(distribution.probs, expected, rtol=0, atol=1e-10)
    at_root = tree.distributions[0]
    drawn = np.bincount([tree.tokens[node] for node in at_root.draws], minlength=V)
    expected = at_root.probs.numpy() * drawn.sum()
    assert ((drawn - expected) ** 2 / expected).sum() < 15  # chi-squared with two degrees of freedom


@pytest.mark.parametrize("arguments", [{"markov_rank": 3}, {}, {"tree": "chain", "markov_rank": 3}], ids=str)
def test_the_nodes_of_a_drafter_have_the_probabilities_that_its_loss_raises(make_ctc, base_weights, arguments):
    drafter = make_ctc(merge_repeats=False, **arguments)
    hidden, ids = torch.randn(12, 16), torch.randint(0, 23, (12,))
    anchors = torch.tensor([3, 7, 11])
    trees = drafter.draft_at(hidden, ids, anchors, base_weights)
    frames = drafter(hidden[None], anchors[None], ids[anchors][None], base_weights.embedding, ids[None])[0]
    repeats = 0
    for tree, anchor, own in zip(trees, anchors.tolist(), frames, strict=True):
        assert len(tree) > 1
        for node, probability in enumerate(tree.probabilities):
            labels = torch.tensor([tree.path_tokens(node)])
            repeats += int((labels[:, 1:] == labels[:, :-1]).any())
            previous = torch.cat([ids[anchor].reshape(1, 1), labels], 1)
            bias = drafter.markov.factors(previous, base_weights) if drafter.markov else ()
            given = own[None], labels, base_weights.head, drafter.blank_row, drafter.blank_bias[0], *bias
            emissions = emit(*given)
            columns = emissions.enter, emissions.stay, emissions.blank
            expected = prefix_log_probs(*columns, labels, merge_repeats=False)[1][0, -1].exp().item()
            assert probability == pytest.approx(expected, rel=1e-4)
    assert repeats or arguments.get("tree") == "chain"


@torch.inference_mode()
def test_without_blanks_every_drawn_text_has_a_token_for_each_frame(make_ctc, base_weights):
    drafter = make_ctc(merge_repeats=False, blank_bias=-1e4, draws=30, num_nodes=999)
    frames = torch.zeros(1, drafter.num_frames, 16)  # all tokens are equally probable: a few texts repeat one
    tree = drafter.draft(frames, 1, base_weights, Limits(max_depth=99, max_nodes=999))
    leaves = set(range(len(tree))) - set(tree.parents)
    assert {len(tree.path_tokens(node)) for node in leaves} == {drafter.num_frames}
    assert any(tree.tokens[node] == tree.tokens[parent] for node, parent in enumerate(tree.parents) if parent >= 0)


def test_the_paper_s_tree_is_refused(make_ctc):
    with pytest.raises(ValueError, match="the paper's tree merges repeats, which this drafter does not: set tree"):
        make_ctc(merge_repeats=False, tree="paper")
