"""Dimensions, weights and texts of a toy base, without loading a model, and the literal probabilities of CTC texts."""

from collections import defaultdict
from functools import cache
from itertools import product

import pytest
import torch

from benchmarks import recipes
from drafters import CTC, BaseShape, BaseWeights, DraftTree, StepResult, TrainingBatch
from drafters.losses import chunks

SHAPE = BaseShape(hidden_size=16, vocab_size=23, num_layers=3, num_heads=2, head_dim=8, intermediate_size=24)


@pytest.fixture
def shape():
    return SHAPE


@pytest.fixture
def base_weights():
    generator = torch.Generator().manual_seed(7)
    return BaseWeights(*(torch.randn(SHAPE.vocab_size, SHAPE.hidden_size, generator=generator) for _ in range(2)))


def in_float64(base_weights):
    return BaseWeights(base_weights.embedding.double(), base_weights.head.double())


def random_drafter(kind, shape, options, std=0.3, dtype=torch.float64, is_random=lambda weight: weight.dim() == 2):
    """Build a drafter with weights large enough that context matters; equal options give equal weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drafter = recipes.build(kind, shape, options).to(dtype)
        for weight in filter(is_random, drafter.parameters()):
            torch.nn.init.normal_(weight, std=std)
        if kind is CTC:
            torch.nn.init.normal_(drafter.blank_row, std=std)
    return drafter


def text_for(drafter, seed=3, length=20):
    """The base's states that a drafter reads, and the tokens of a text."""
    generator, size = torch.Generator().manual_seed(seed), 16 * len(drafter.required_outputs.hidden_layers)
    hidden = torch.randn(length, size, generator=generator, dtype=torch.float64)
    return hidden, torch.randint(0, 23, (length,), generator=generator)


@pytest.fixture
def small_chunks(monkeypatch):
    """Losses are computed for a few anchors or positions at once."""
    monkeypatch.setattr(chunks, "MAX_BYTES", 8 * 3 * 2 * SHAPE.vocab_size)


@pytest.fixture
def text():
    """Float32 states (S, D) of one layer of the base, and the tokens (S,) of a text."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(20, 16, generator=generator), torch.randint(0, 23, (20,), generator=generator)


def batch_for(drafter, rows=2, length=20, mask=None, seed=0):
    """A batch of such texts, most of whose tokens are the assistant's."""
    generator, size = torch.Generator().manual_seed(seed), 16 * len(drafter.required_outputs.hidden_layers)
    hidden = torch.randn(rows, length, size, generator=generator, dtype=torch.float64)
    last = hidden if size == 16 else torch.randn(rows, length, 16, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, 23, (rows, length), generator=generator)
    mask = torch.rand(rows, length, generator=generator) < 0.8 if mask is None else mask
    return TrainingBatch(hidden, last, ids, ids.roll(-1, 1), mask)


def committed(hidden):
    """Return a step result that cached these positions of the base and accepted no node."""
    return StepResult(num_pending=len(hidden), tree=DraftTree(), hidden=hidden, path=[], emitted=[0])


def ready(drafter, hidden, ids, anchor):
    """The drafter ready to draft at a root, with all earlier positions observed in one step."""
    drafter.begin(ids[:anchor].tolist())
    drafter.observe(committed(hidden[:anchor]))
    return drafter


def paths_of(tree):
    return [tuple(tree.path_tokens(node)) for node in range(len(tree))]


def paths(tree):
    return set(paths_of(tree))


@pytest.fixture
def make_ctc():
    """Build a random CTC drafter."""

    def make(**arguments):
        options = {"num_frames": 6, "num_labels": 4, "num_nodes": 12, "top_k": 4} | arguments
        return random_drafter(CTC, SHAPE, options, dtype=torch.float32)

    return make


@cache
def alignments(num_frames, vocab_size, root):
    """Every alignment, the last token before each of its frames, and the alignments of each text and of each prefix."""
    blank, last, whole, begins = vocab_size, [], defaultdict(list), defaultdict(list)
    every = list(product(range(vocab_size + 1), repeat=num_frames))
    for number, symbols in enumerate(every):
        text, before, emitted = [], blank, []
        for symbol in symbols:
            emitted.append(text[-1] if text else root)
            if symbol != blank and symbol != before:
                text.append(symbol)
            before = symbol
        last.append(emitted)
        whole[tuple(text)].append(number)
        for length in range(len(text) + 1):
            begins[tuple(text[:length])].append(number)
    return torch.tensor(every), torch.tensor(last), whole, begins


class LiteralTexts:
    """The probability of each text of T frames over V tokens and a blank: the sum over the alignments that spell it.

    Args:
        probs: (T, L, V + 1) distribution of each frame after each last token, the blank last.
        root: Row of ``probs`` that holds while nothing is emitted.
    """

    def __init__(self, probs, root):
        every, last, self.whole_of, self.begins_of = alignments(len(probs), probs.shape[2] - 1, root)
        self.alignments = every
        self.probabilities = probs[torch.arange(len(probs)), last, every].prod(1)  # (N,)

    def whole(self, text):
        """P(the text is this one)."""
        return self.probabilities[self.whole_of.get(tuple(text), [])].sum()

    def begins(self, text):
        """P(the text begins with this one)."""
        return self.probabilities[self.begins_of.get(tuple(text), [])].sum()

    def every(self):
        """P(the text begins with it) of every text that some alignment spells, shorter ones first."""
        return {text: float(self.begins(text)) for text in sorted(self.begins_of, key=len)}

    def best(self, num_nodes, allowed=lambda text: True):
        """The most probable texts, without the empty one, and their probabilities."""
        every = [pair for pair in self.every().items() if pair[0] and pair[1] > 0 and allowed(pair[0])]
        return dict(sorted(every, key=lambda pair: -pair[1])[:num_nodes])


@pytest.fixture(scope="session")
def literal_texts():
    return LiteralTexts
