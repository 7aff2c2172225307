"""Drafters that can draft only a part of the base's vocabulary, against enumerations and smaller vocabularies."""

from collections import defaultdict
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from benchmarks import recipes
from drafters import CTC, EAGLE3, BaseShape, BaseWeights, Block, Limits, TrainingBatch
from drafters.ctc.reference import collapse
from drafters.nn.draft_vocabulary import DraftVocabulary, most_frequent
from drafters.parallel import Roots
from drafters.protocol import UNLIMITED
from tests.conftest import check_tree
from tests.drafters.conftest import committed, random_drafter

V, D, S = 12, 8, 18
SIZES = {"hidden_size": D, "num_layers": 2, "num_heads": 2, "head_dim": 4, "intermediate_size": 12}
SHAPE = BaseShape(vocab_size=V, **SIZES)
DRAFTED = torch.tensor([1, 4, 5, 8, 11])
INSIDE, OUTSIDE = 5, 3
SMALL = {"num_frames": 3, "num_labels": 3, "num_anchors": S, "num_nodes": 20, "top_k": V, "markov_rank": 2}


@pytest.fixture
def weights():
    generator = torch.Generator().manual_seed(7)
    return BaseWeights(*(torch.randn(V, D, generator=generator, dtype=torch.float64) for _ in range(2)))


def make(kind, shape=SHAPE, **arguments):
    """A float64 drafter for five of twelve tokens, whose context matters; equal options give equal weights."""
    options = {"draft_vocab_size": 5} | SMALL | arguments
    if kind is Block:
        del options["num_labels"]
    drafter = random_drafter(kind, shape, options, std=0.5)
    if drafter.draft_tokens is not None:
        drafter.draft_tokens.copy_(DRAFTED)
    return drafter.eval()


def texts(tokens, seed=3):
    generator = torch.Generator().manual_seed(seed)
    ids = tokens[torch.randint(len(tokens), (2, S), generator=generator)]
    hidden = torch.randn(2, S, D, generator=generator, dtype=torch.float64)
    return TrainingBatch(hidden, hidden, ids, ids.roll(-1, 1), torch.ones(2, S, dtype=torch.bool))


def ready(drafter, weights, hidden):
    drafter.attach_base_weights(weights)
    drafter.begin([])
    drafter.observe(committed(hidden))
    return drafter


# ---- the vocabulary


@pytest.mark.parametrize("seed", range(4))
def test_the_most_frequent_tokens_are_those_of_a_sort_and_some_are_kept(seed):
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(4, (V,), generator=generator)
    kept = {int(token) for token in torch.randperm(V, generator=generator)[:3]}
    others = sorted(set(range(V)) - kept, key=lambda token: (-counts[token], token))
    assert most_frequent(counts, 7, kept).tolist() == sorted([*kept, *others[:4]])
    with pytest.raises(ValueError, match=r"draft_vocab_size \(2\) is less than the 3"):
        most_frequent(counts, 2, kept)


def test_labels_end_before_the_first_that_cannot_be_drafted():
    vocabulary = DraftVocabulary(torch.tensor([6, 2, 9]), vocab_size=10)
    labels = torch.tensor([[2, 9, 6], [6, 0, 2], [5, 2, 2]])
    columns, valid = vocabulary.cut(labels, torch.tensor([[True, True, False], [True] * 3, [True] * 3]))
    assert valid.tolist() == [[True, True, False], [True, False, False], [False] * 3]
    assert columns[valid].tolist() == [1, 2, 0]
    spread = vocabulary.spread(torch.tensor([1.0, 2.0, 3.0, 4.0]), fill=0.0)
    assert spread.tolist() == [0, 0, 2, 0, 0, 0, 1, 0, 0, 3, 4]


NO_LIST, NO_SET = "is not a list of token ids", "names tokens twice, or tokens outside the vocabulary of 12"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [(5, NO_LIST), ([0.1, 0.2, 0.3, 0.4, 0.5], NO_LIST), ([1, 4, 4, 8, 11], NO_SET), ([1, 4, 5, 8, 12], NO_SET)],
    ids=["one", "floats", "twice", "outside"],
)
def test_a_wrong_vocabulary_is_not_loaded(wrong, said):
    drafter = make(CTC)
    with pytest.raises(RuntimeError, match=f"draft_tokens {said}"):
        drafter.load_state_dict(drafter.state_dict() | {"draft_tokens": torch.tensor(wrong)})


# ---- drafting


def frame_logits(drafter, weights, hidden, root):
    """Logits (T, W) over what can be drafted, and the bias (V, W) after each token, without the code under test."""
    at = torch.tensor([[len(hidden)]])
    with torch.no_grad():
        frames = drafter(hidden[None], Roots(at, torch.tensor([[root]]), None), weights.embedding)[0, 0]
        left, right = drafter.markov.factors(torch.arange(V), BaseWeights(weights.embedding, weights.head[DRAFTED]))
        logits = frames @ weights.head[DRAFTED].T
        if isinstance(drafter, CTC):
            logits = torch.cat([logits, (frames @ drafter.blank_row + drafter.blank_bias)[:, None]], dim=-1)
    return logits, (left @ right.T).double()


def prefixes(logits, bias, root):
    """P(the text begins with g) for each text g of token ids, over all alignments of CTC frames."""
    begins, blank, tokens = defaultdict(float), len(DRAFTED), DRAFTED.tolist()
    for symbols in product(range(blank + 1), repeat=len(logits)):
        last, probability = root, 1.0
        for frame, symbol in zip(logits, symbols, strict=True):
            probability *= (frame + bias[last]).softmax(-1)[symbol].item()
            last = last if symbol == blank else tokens[symbol]
        text = tuple(tokens[column] for column in collapse(torch.tensor(symbols), blank))
        for length in range(1, len(text) + 1):
            begins[text[:length]] += probability
    return begins


@pytest.mark.parametrize("factors", ["own", "base"])
@pytest.mark.parametrize("root", [INSIDE, OUTSIDE])
def test_the_ctc_tree_has_the_most_probable_prefixes_of_an_enumeration(weights, factors, root):
    drafter, hidden = make(CTC, markov_factors=factors), texts(DRAFTED).hidden[0, :6]
    begins = prefixes(*frame_logits(drafter, weights, hidden, root), root)
    best = sorted(begins, key=begins.get, reverse=True)[:20]
    tree = ready(drafter, weights, hidden).propose([0] * 6 + [root], UNLIMITED)
    assert [tuple(tree.path_tokens(node)) for node in range(20)] == best
    np.testing.assert_allclose(tree.probabilities, [begins[path] for path in best])
    ends = drafter.propose([0] * 6 + [root], Limits(9, eos=frozenset({best[0][0], OUTSIDE})))
    assert not any(parent >= 0 and ends.tokens[parent] == best[0][0] for parent in ends.parents)


@pytest.mark.parametrize("root", [INSIDE, OUTSIDE])
def test_the_block_tree_has_the_most_probable_paths_of_an_enumeration(weights, root):
    drafter, hidden = make(Block), texts(DRAFTED).hidden[0, :6]
    logits, bias = frame_logits(drafter, weights, hidden, root)
    scores = {}
    for path in (path for length in (1, 2, 3) for path in product(range(5), repeat=length)):
        last, scores[tuple(DRAFTED[list(path)].tolist())] = root, 1.0
        for frame, column in zip(logits, path, strict=False):
            scores[tuple(DRAFTED[list(path)].tolist())] *= (frame + bias[last]).softmax(-1)[column].item()
            last = int(DRAFTED[column])
    tree = ready(drafter, weights, hidden).propose([0] * 6 + [root], UNLIMITED)
    best = sorted(scores, key=scores.get, reverse=True)[:20]
    assert [tuple(tree.path_tokens(node)) for node in range(20)] == best


@pytest.mark.parametrize("root", [INSIDE, OUTSIDE])
def test_drawn_drafts_state_the_distribution_of_an_enumeration_over_the_bases_vocabulary(weights, root):
    drafter, hidden = make(CTC, draws=6), texts(DRAFTED).hidden[0, :6]
    begins = prefixes(*frame_logits(drafter, weights, hidden, root), root)
    tree = ready(drafter, weights, hidden).propose([0] * 6 + [root], Limits(9, draft_seed=3))
    check_tree(tree, V)
    assert len(tree.distributions) > 1
    for children in tree.distributions:
        path = tuple(tree.path_tokens(children.parent)) if children.parent >= 0 else ()
        after = torch.tensor([begins.get((*path, token), 0.0) for token in range(V)], dtype=torch.float64)
        torch.testing.assert_close(children.probs, after / after.sum(), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("kind", [CTC, Block, EAGLE3])
def test_a_draft_vocabulary_larger_than_the_bases_is_that_of_the_base(kind):
    options = {"own_head": True, "hidden_layers": [-1]} if kind is EAGLE3 else {"markov_rank": 2, "num_frames": 8}
    shapes = []
    for size in (V, V + 1):
        state = recipes.build(kind, SHAPE, options | {"draft_vocab_size": size}).state_dict()
        shapes.append({name: weight.shape for name, weight in state.items()})
    assert shapes[0] == shapes[1] and shapes[1]["draft_tokens"] == (V,)


@pytest.mark.parametrize("kind", [CTC, Block])
def test_a_draft_vocabulary_of_all_tokens_changes_nothing(weights, kind):
    batch, anchors = texts(torch.arange(V)), torch.arange(1, S)
    whole, every = make(kind, draft_vocab_size=None), make(kind, draft_vocab_size=None)
    every.draft_tokens = torch.arange(V)
    torch.manual_seed(1)
    expected = whole.loss(batch, weights)[0]
    torch.manual_seed(1)
    assert torch.equal(every.loss(batch, weights)[0], expected)
    trees = [drafter.draft_at(batch.hidden[0], batch.input_ids[0], anchors, weights) for drafter in (whole, every)]
    assert trees[0] == trees[1]


# ---- training


def loss_of(drafter, batch, weights):
    torch.manual_seed(1)
    return drafter.loss(batch, weights)[0]


@pytest.mark.parametrize("kind", [CTC, Block])
def test_where_all_tokens_can_be_drafted_the_loss_is_that_of_a_base_of_these_tokens(weights, kind):
    drafter = make(kind)
    small = make(kind, BaseShape(vocab_size=5, **SIZES), draft_vocab_size=None)
    state = {name: weight for name, weight in drafter.state_dict().items() if name != "draft_tokens"}
    small.load_state_dict(state | {"markov.left": state["markov.left"][DRAFTED]})
    few = BaseWeights(weights.embedding[DRAFTED], weights.head[DRAFTED])
    batch, renumbered = texts(DRAFTED), texts(torch.arange(5))
    torch.testing.assert_close(loss_of(drafter, batch, weights), loss_of(small, renumbered, few))


@pytest.mark.parametrize("kind", [CTC, Block, EAGLE3])
def test_a_label_that_cannot_be_drafted_ends_the_labels_as_the_end_of_the_turn_does(weights, kind):
    arguments = {"num_unroll": 3, "own_head": True, "draft_vocab_size": 5, "hidden_layers": [-1]}
    drafter = make(kind) if kind is not EAGLE3 else recipes.build(EAGLE3, SHAPE, arguments).double()
    drafter.draft_tokens.copy_(DRAFTED)
    batch = texts(DRAFTED)
    cut, ended = replace(batch, labels=batch.labels.clone()), replace(batch, loss_mask=batch.loss_mask.clone())
    cut.labels[0, 7], ended.loss_mask[0, 8] = OUTSIDE, False  # the label at 7 is the token at 8
    loss = loss_of(drafter, cut, weights)
    torch.testing.assert_close(loss, loss_of(drafter, ended, weights))
    assert not torch.isclose(loss, loss_of(drafter, batch, weights))
