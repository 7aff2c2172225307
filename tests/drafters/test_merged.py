"""The merged drafter, against an enumeration of all continuations, and in the decoding loop."""

import random
from itertools import product

import pytest

import drafters
from drafters import DraftTree
from drafters.merged import combine
from drafters.protocol import Limits, StepResult
from drafters.training_free.joint import extended
from inference.verifier.sampling import KeyedSampler
from inference.verifier.session import Session
from tests.conftest import check_tree

VOCAB, DEPTH = 5, 4


class Fixed(drafters.Drafter):
    """Stands for a learned drafter: always the same tree, with its probabilities."""

    def __init__(self, tree):
        self.tree, self.limits = tree, []

    def propose(self, seq, limits):
        self.limits.append(limits)
        return self.tree


def random_tree(rng, num_nodes=8):
    """A tree whose children share what their parent has."""
    tokens, parents, probabilities, left = [], [], [], {-1: 1.0}
    while len(tokens) < num_nodes:
        parent = rng.choice(list(left))
        token = rng.randrange(VOCAB)
        if (parent, token) in zip(parents, tokens, strict=True):
            continue
        probability = rng.uniform(0.2, 0.7) * left[parent]
        left[parent] -= probability
        left[len(tokens)] = probability
        tokens.append(token)
        parents.append(parent)
        probabilities.append(probability)
    return DraftTree(tokens, parents, probabilities=probabilities)


def repetitive(rng, length):
    """A text in which n-grams are right often."""
    phrase = [rng.randrange(VOCAB) for _ in range(6)]
    return [rng.randrange(VOCAB) if rng.random() < 0.2 else phrase[place % 6] for place in range(length)]


def trained(rng, tree, **options):
    """A merged drafter that has seen a text, with weights that have moved; and the text."""
    merged = drafters.Merged(Fixed(tree), drafters.Joint(), **options)
    seq = repetitive(rng, 40)
    merged.begin(seq[:20])
    for place in range(20, 40):
        merged.propose(seq[:place], Limits(DEPTH))
        merged.observe(StepResult(1, DraftTree(), None, [], [seq[place]], [[seq[place], 0, 1, 2]]))
    return merged, seq


def enumerate_paths(merged, seq, tree, eos=()):
    """The probability of each path of at most `DEPTH` tokens, multiplied up without a tree or a queue."""
    by_path = {tuple(tree.path_tokens(node)): tree.probabilities[node] for node in range(len(tree))}
    by_path[()] = 1.0
    probabilities = {(): 1.0}
    for path in (path for depth in range(DEPTH) for path in product(range(VOCAB), repeat=depth)):
        if path not in probabilities or (path and path[-1] in eos):
            continue
        keys = merged.ngrams.contexts_after(seq)
        for token in path:
            keys = extended(keys, token, merged.ngrams.order)
        learned = {
            token: by_path[(*path, token)] / by_path[path] for token in range(VOCAB) if (*path, token) in by_path
        }
        ngrams = {token: probability for probability, token in merged.ngrams.following(keys)}
        for token, evidence in combine(learned, ngrams):
            probabilities[(*path, token)] = probabilities[path] * merged._mixer.probability(evidence)
    del probabilities[()]
    return probabilities


@pytest.mark.parametrize("seed", range(12))
def test_the_tree_holds_the_most_probable_of_all_continuations(seed):
    rng = random.Random(seed)
    learned, eos = random_tree(rng), frozenset({VOCAB - 1} if seed % 3 == 0 else ())
    merged, seq = trained(rng, learned, num_nodes=12, min_probability=1e-9)
    expected = enumerate_paths(merged, seq, learned, eos)
    tree = merged.propose(seq, Limits(DEPTH, eos=eos))
    check_tree(tree, VOCAB)
    paths = {tuple(tree.path_tokens(node)): tree.probabilities[node] for node in range(len(tree))}
    best = sorted(expected.values(), reverse=True)[: len(paths)]
    assert len(paths) == 12
    assert list(tree.probabilities) == pytest.approx(best)
    assert paths == pytest.approx({path: expected[path] for path in paths})
    by_both = {tuple(learned.path_tokens(node)) for node in range(len(learned))}
    assert by_both & paths.keys() and paths.keys() - by_both, "both drafters have nodes in it"


def test_smaller_budgets_and_thresholds_take_the_first_nodes_of_the_same_tree():
    rng = random.Random(1)
    learned = random_tree(rng)
    merged, seq = trained(rng, learned, num_nodes=12, min_probability=1e-9)
    whole = merged.propose(seq, Limits(DEPTH))
    for num_nodes in (1, 5):
        assert merged.propose(seq, Limits(DEPTH, num_nodes)) == whole.first(num_nodes)
    assert merged.learned.limits[-1].max_nodes > 12, "a small budget takes the best nodes of both drafters' whole trees"
    merged.min_probability = whole.probabilities[6]
    assert merged.propose(seq, Limits(DEPTH)) == whole.first(7)
    num_drafts = len(merged.learned.limits)
    assert len(merged.propose(seq, Limits(DEPTH, 0))) == len(merged.propose(seq, Limits(0))) == 0
    assert len(merged.learned.limits) == num_drafts, "no draft, no draft pass"


def test_a_learned_drafter_that_is_always_wrong_loses_its_place_in_the_tree():
    learned = DraftTree([1, 2], [-1, -1], probabilities=[0.5, 0.4])
    merged, seq = trained(random.Random(0), learned)

    def probability_of_learned():
        tree = merged.propose(seq, Limits(1))
        named = [tree.child(-1, token) for token in (1, 2)]
        return sum(tree.probabilities[node] for node in named if node is not None)

    before = probability_of_learned()
    for _ in range(60):
        merged.propose(seq, Limits(DEPTH))
        merged.observe(StepResult(1, DraftTree(), None, [], [0], [[0, 3, 4, 3]]))
        merged.rewind(len(seq))
    assert probability_of_learned() < 0.5 * before


def test_drawn_drafts_and_trees_without_probabilities_are_refused():
    drawing = Fixed(DraftTree())
    drawing.samples_drafts = True
    with pytest.raises(ValueError, match="set draws of the learned drafter to 0"):
        drafters.Merged(drawing, drafters.Joint())
    merged = drafters.Merged(Fixed(DraftTree([1, 2], [-1, 0])), drafters.Joint())
    merged.begin([3])
    with pytest.raises(ValueError, match="gives no probabilities"):
        merged.propose([3], Limits(4))


@pytest.mark.parametrize("sampled", [False, True])
def test_the_text_is_the_bases_own_and_a_useless_learned_drafter_hardly_harms(pseudo_runner, sampled):
    sampler = KeyedSampler(temperature=0.3, seed=3) if sampled else None
    text, joint, merged = (
        Session(pseudo_runner(), drafter, sampler).run([1, 2, 3], 300)
        for drafter in (
            drafters.NoDrafter(),
            drafters.Joint(num_nodes=8),
            drafters.Merged(Fixed(random_tree(random.Random(0))), drafters.Joint(), num_nodes=8),
        )
    )
    assert joint.tokens == merged.tokens == text.tokens
    assert len(merged.steps) < 1.15 * len(joint.steps) < 0.9 * len(text.steps)
