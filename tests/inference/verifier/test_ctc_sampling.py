"""Drafts drawn from a CTC drafter do not change the base's distribution.

Shown by enumeration of all drafts and acceptances, and by counting through the whole engine. Wrong rules are detected.
"""

import random
from collections import defaultdict
from dataclasses import replace
from functools import cache, partial
from itertools import product

import numpy as np
import pytest
import torch

from benchmarks import recipes
from drafters import CTC
from drafters.ctc.reference import collapse
from drafters.ctc.trees import draw
from drafters.tree import ROOT
from drafters.trees.search import SearchLimits
from inference.verifier.acceptance import multi_round_rejection
from inference.verifier.sampling import KeyedSampler, TreeLogits
from tests.inference.verifier.oracles import chi_square_of_pairs, threshold

START, UNLIMITED = 1, 99
ALMOST_ONE = 1 - 1e-15


class Scripted:
    """A generator that returns given numbers."""

    def __init__(self, numbers):
        self.numbers = numbers

    def random(self, shape):
        assert self.numbers.shape == shape
        return self.numbers


class World:
    """A CTC draft of T frames and a base, both random, over V tokens; all texts and trees that can be drawn.

    With the default seed the distributions of draft and base differ much, so that errors show.

    The base's distribution of the next token is another one after every text. Its joint distribution is over T + 1
    tokens, the most that one step emits.
    """

    def __init__(self, num_frames, vocab, biased, seed=5):
        generator = torch.Generator().manual_seed(seed)
        normal = partial(torch.randn, generator=generator, dtype=torch.float64)
        self.num_frames, self.vocab = num_frames, vocab
        self.logits = normal(num_frames, vocab + 1) * 1.2
        self.table = normal(vocab, vocab + 1) * 1.5 if biased else None
        self.bias = (lambda tokens: self.table[tokens]) if biased else None
        self.base = {
            path: (normal(vocab) * 1.5).softmax(-1)
            for length in range(num_frames + 1)
            for path in product(range(vocab), repeat=length)
        }
        self.texts, self.numbers = defaultdict(float), {}
        for symbols in product(range(vocab + 1), repeat=num_frames):
            numbers, probability = self._middle(symbols)
            text = tuple(collapse(torch.tensor(symbols), blank=vocab))
            self.texts[text] += probability
            self.numbers[text] = numbers  # of one of its alignments; the tree is the same for all

    def _middle(self, symbols):
        """Numbers (T,) that draw an alignment, and its probability."""
        last, numbers, probability = START, [], 1.0
        for frame, symbol in zip(self.logits, symbols, strict=True):
            distribution = (frame if self.table is None else frame + self.table[last]).softmax(-1)
            numbers.append((distribution[:symbol].sum() + distribution[symbol] / 2).item())
            probability *= distribution[symbol].item()
            last = last if symbol == self.vocab else symbol
        return np.array(numbers), probability

    @cache  # noqa: B019  a world lives as long as the tests
    def trees(self, num_texts, max_nodes=UNLIMITED, max_depth=UNLIMITED, eos=()):
        """Every tree `draw` can give, with its probability."""
        found = []
        for texts in product(self.texts, repeat=num_texts):
            script = Scripted(np.stack([self.numbers[text] for text in texts], axis=1))
            tree = draw(self.logits, START, num_texts, SearchLimits(max_nodes, max_depth, eos), script, self.bias)
            found.append((tree, np.prod([self.texts[text] for text in texts])))
        return found

    @cache  # noqa: B019  as above
    def joint(self, path=()):
        """The base's distribution of all tokens that follow a path, up to T + 1 in all: (V, ..., V)."""
        distribution = self.base[path]
        if len(path) == self.num_frames:
            return distribution
        return torch.stack([distribution[token] * self.joint((*path, token)) for token in range(self.vocab)])


class Acceptance:
    """What multi-round rejection does at a node, found by trying it once for each path, draws and distribution."""

    def __init__(self, world):
        self.world, self.known = world, {}

    def at(self, tree, distribution, path):
        """The share of numbers that accept each draw after the earlier ones were rejected, and the residual."""
        tokens = tuple(tree.tokens[node] for node in distribution.draws)
        key = path, tokens, tuple(distribution.probs.tolist())
        if key not in self.known:
            target = self.world.base[path]

            def takes(index, u):
                taken, choice, _ = multi_round_rejection(
                    target, distribution, tree, lambda i: u if i == index else ALMOST_ONE
                )
                return bool(taken) and choice == tokens[index]

            shares, left = [], target  # what the rule of the papers has left of the base's distribution
            for index, token in enumerate(tokens):
                guess = min(1.0, (left[token] / distribution.probs[token]).item())
                shares.append(threshold(partial(takes, index), guess))
                left = (left - distribution.probs).clamp(min=0)
                left = left / left.sum().clamp(min=1e-30)
            residual = multi_round_rejection(target, distribution, tree, lambda i: ALMOST_ONE)[2]
            self.known[key] = shares, (residual / residual.sum()).tolist()
        return self.known[key]

    def emitted(self, tree, weight, into):
        """Add the probability of each series of tokens that one step may emit."""
        distributions = {distribution.parent: distribution for distribution in tree.distributions}

        def go_on(node, path, weight):
            if node not in distributions:
                after = self.world.base[path].tolist()
            else:
                shares, after = self.at(tree, distributions[node], path)
                for child, share in zip(distributions[node].draws, shares, strict=True):
                    if share:
                        go_on(child, (*path, tree.tokens[child]), weight * share)
                    weight *= 1 - share
            for token, probability in enumerate(after):
                into[(*path, token)] += weight * probability

        go_on(ROOT, (), weight)


@cache
def world_of(num_frames, vocab, biased):
    """A world that tests share: what it remembers is what they would all compute again."""
    return World(num_frames, vocab, biased)


@cache
def acceptance_in(world):
    return Acceptance(world)


def written_distribution(world, trees):
    """Distribution of T + 1 tokens, those of a step and the base's after it, over all trees and acceptances."""
    acceptance, emissions = acceptance_in(world), defaultdict(float)
    for tree, weight in trees:
        acceptance.emitted(tree, weight, emissions)
    distribution = torch.zeros_like(world.joint())
    for path, probability in emissions.items():
        distribution[path] += probability * (world.joint(path) if len(path) <= world.num_frames else 1.0)
    return distribution


def distance(world, trees):
    """Total variation distance between the emitted text's distribution and the base's own."""
    distribution = written_distribution(world, trees)
    assert distribution.sum().item() == pytest.approx(1, abs=1e-6)
    return (distribution - world.joint()).abs().sum().item() / 2


each_bias = pytest.mark.parametrize("biased", [False, True], ids=["without bias", "with bias"])
EXACT = 1e-7


CUTS = [{"max_nodes": 2}, {"max_nodes": 3}, {"max_depth": 1}, {"max_depth": 2, "max_nodes": 3}]
DRAWS = [(sizes, {}) for sizes in [(3, 3, 1), (3, 3, 2), (4, 3, 1), (4, 2, 2), (2, 3, 3), (3, 2, 3)]]
DRAWS += [(sizes, limits) for sizes in [(3, 3, 2), (3, 2, 3)] for limits in CUTS]
DRAWS += [((3, 3, 2), {"max_nodes": 3, "eos": (2,)})]


@pytest.mark.slow
@each_bias
@pytest.mark.parametrize(("sizes", "limits"), DRAWS, ids=str)
def test_the_emitted_text_follows_the_bases_distribution_whatever_limits_cut_the_tree(sizes, limits, biased):
    num_frames, vocab, num_texts = sizes
    world = world_of(num_frames, vocab, biased)
    assert distance(world, world.trees(num_texts, **limits)) < EXACT


@pytest.mark.slow
def test_the_sampler_accepts_as_the_enumeration_does():
    world, rng = world_of(3, 3, True), random.Random(0)
    acceptance = Acceptance(world)
    lengths = defaultdict(int)
    for tree, _ in world.trees(2):
        numbers = defaultdict(rng.random)
        sampler = KeyedSampler()
        sampler.uniform = lambda position, stream=0, numbers=numbers: numbers[position, stream]
        paths = [(), *(tuple(tree.path_tokens(node)) for node in range(len(tree)))]
        logits = torch.stack([world.base[path].log() for path in paths])
        _, emitted = sampler.accept(tree, sampler.decide(TreeLogits(logits, tree)).tolist())

        distributions, node, path = {distribution.parent: distribution for distribution in tree.distributions}, ROOT, ()
        while node is not None:
            shares, after = (
                acceptance.at(tree, distributions[node], path)
                if node in distributions
                else ([], world.base[path].tolist())
            )
            draws = distributions[node].draws if node in distributions else ()
            taken = [i for i, share in enumerate(shares) if numbers[len(path), 1 + i] < share]
            node = draws[taken[0]] if taken else None
            token = tree.tokens[node] if taken else int(np.searchsorted(np.cumsum(after), numbers[len(path), 0]))
            path = (*path, token)
        assert emitted == list(path)
        lengths[len(path)] += 1
    assert set(lengths) == {1, 2, 3, 4}


# ---- what is wrong is found out


def with_distributions(trees, change):
    for tree, weight in trees:
        distributions = tuple(
            replace(distribution, probs=change(tuple(tree.path_tokens(distribution.parent)), distribution.probs))
            for distribution in tree.distributions
        )
        yield replace(tree, distributions=distributions), weight


def begins(world, path):
    return sum(probability for text, probability in world.texts.items() if text[: len(path)] == path)


def without_bias(world, path, distribution):
    plain = world_of(3, 3, False)
    after = torch.tensor([begins(plain, (*path, token)) for token in range(3)], dtype=torch.float64)
    return after / after.sum()


WRONG = {  # what a tree may say instead of the distribution of a node
    "ignores that some texts end": lambda world, path, q: q * (1 - world.texts[path] / begins(world, path)),
    "of a frame": lambda world, path, q: world.logits[len(path), :3].softmax(-1),
    "without its bias": without_bias,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "biased"), [(wrong, biased) for wrong in WRONG for biased in (False, True) if biased or wrong[0] != "w"]
)
def test_a_wrong_distribution_is_detected(wrong, biased):
    world = world_of(3, 3, biased)
    assert distance(world, with_distributions(world.trees(2), partial(WRONG[wrong], world))) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("max_nodes", [1, 2])
def test_cutting_nodes_after_the_draw_is_detected(max_nodes):
    """Then a draw is kept if it equals an earlier one, and dropped otherwise: a bias."""
    world = world_of(3, 3, False)
    trees = ((tree.pruned(UNLIMITED, max_nodes, ()), weight) for tree, weight in world.trees(2))
    assert distance(world, trees) > 0.01


# ---- through the whole engine


@pytest.mark.slow
def test_texts_drawn_from_a_part_of_the_vocabulary_do_not_change_the_joint_distribution(make_base):
    """A drafter for four of six tokens; a root may be one of the other two."""
    base = make_base(vocab=6, layers=1, hidden=16)
    options = {"num_frames": 4, "num_labels": 3, "draws": 2, "markov_rank": 2, "draft_vocab_size": 4}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        drafter = recipes.build(CTC, base.shape, options | {"draw_temperature": 1.5})
        torch.nn.init.normal_(drafter.markov.right)
    drafter.draft_tokens.copy_(torch.tensor([0, 2, 3, 4]))
    drafter.to(base.model.dtype).eval().requires_grad_(False).attach_base_weights(base.base_weights)
    statistic, accepted = chi_square_of_pairs(base, drafter, 250, 4, first=1)
    assert statistic < 67  # one in a thousand, 36 degrees of freedom
    assert accepted > 0.3, "the test proves little if hardly anything is accepted"
