"""The joint drafter, against slow reference versions of its tables, its probabilities and its tree."""

import random

import numpy as np
import pytest

from drafters import DraftTree
from drafters.protocol import Limits, StepResult
from drafters.training_free import joint
from drafters.training_free.corpus import CorpusTable
from drafters.training_free.joint import RUNNERS_UP, FollowerTable, FollowerWeights, Joint, extended
from inference.indexes import count
from inference.verifier.session import Session
from tests.conftest import check_tree

FAR = Limits(max_depth=50)


def markov_text(rng, length, vocab=9, order=2, noise=0.2):
    """Return a text that repeats itself, but not exactly."""
    habits, text = {}, [rng.randrange(vocab) for _ in range(order)]
    while len(text) < length:
        usual = habits.setdefault(tuple(text[-order:]), rng.randrange(vocab))
        text.append(rng.randrange(vocab) if rng.random() < noise else usual)
    return text


# ---- the tables


@pytest.mark.parametrize("growth", [1.0, 1.1, 2.0])
def test_the_weight_of_a_follower_sums_its_occurrences_discounted_by_age(growth):
    rng = random.Random(1)
    seen = [rng.randrange(5) for _ in range(40)]
    followers = FollowerWeights(seen[0])
    for token in seen[1:]:
        followers.add(token, growth, max_tokens=9)
    for token in set(seen):
        share = sum(growth**age for age, other in enumerate(seen) if other == token) / sum(
            growth**age for age in range(40)
        )
        assert followers.weights[token] / followers.total == pytest.approx(share)


def test_weights_stay_finite_in_a_very_long_text():
    followers = FollowerWeights(0)
    for index in range(20_000):
        followers.add(index % 3, 1.5, max_tokens=8)
    assert 0 < followers.total < 1e101
    assert sum(followers.weights.values()) == pytest.approx(followers.total)


def test_of_too_many_followers_the_lightest_is_dropped():
    followers = FollowerWeights(0)
    for token in (1, 1, 2, 0, 3):
        followers.add(token, 1.0, max_tokens=3)
    assert set(followers.weights) in ({0, 1, 2}, {0, 1, 3})
    assert followers.total == pytest.approx(sum(followers.weights.values()))


def test_a_full_table_drops_its_oldest_contexts():
    table = FollowerTable(order=1, max_contexts=8)
    table.learn_text(range(10))
    assert 6 <= len(table.widths[0]) <= 8
    assert 8 in table.widths[0] and 0 not in table.widths[0]


# ---- the probabilities


class SlowJoint:
    """The definition on plain lists and tuples: no table is kept, and everything is recounted from the texts."""

    def __init__(self, order, growth):
        self.order, self.growth = order, growth
        self.past, self.text, self.counts_by_bucket = [], [], {}

    def sources(self, context):
        for width in range(min(self.order, len(context)), 0, -1):
            key = tuple(context[-width:])
            for kind, texts in (("text", [self.text]), ("history", self.past)):
                seen = [text[i] for text in texts for i in range(width, len(text)) if tuple(text[i - width : i]) == key]
                if seen:
                    weights = {}
                    for age, token in enumerate(seen):
                        weights[token] = weights.get(token, 0) + self.growth**age
                    yield (kind, width, min(len(weights), 5), min(len(seen), 5)), weights

    def learn(self, token):
        for bucket, weights in self.sources(self.text):
            counts = self.counts_by_bucket.setdefault(bucket, [2, 1])
            counts[0] += 1
            if token in weights:
                counts[1] += 1
                break
        self.text.append(token)

    def following(self, context):
        left, probabilities = 1.0, {}
        for bucket, weights in self.sources(context):
            counts = self.counts_by_bucket.get(bucket, [2, 1])
            share = left * counts[1] / counts[0]
            fresh = {token: weight for token, weight in weights.items() if token not in probabilities}
            if fresh:
                probabilities |= {token: share * weight / sum(fresh.values()) for token, weight in fresh.items()}
                left -= share
        return probabilities


@pytest.mark.parametrize("seed", range(4))
def test_probabilities_equal_those_of_the_slow_definition(seed):
    rng = random.Random(seed)
    quick, slow = Joint(order=3, runner_up=0, fade=0.8), SlowJoint(3, 1.25)
    for _ in range(3):
        text = markov_text(rng, 60, vocab=7)
        slow.past, slow.text = [*slow.past, slow.text], text[:10]
        quick.begin(text[:10])
        for length in range(10, 60):
            quick.propose(text[:length], FAR)
            expected = slow.following(text[:length])
            assert {token: p for p, token in quick.following(quick._keys)} == pytest.approx(expected)
            assert sum(expected.values()) <= 1 + 1e-9
            slow.learn(text[length])
        quick.propose(text, FAR)


def test_runners_up_of_the_base_are_drafted_if_no_other_source_matches():
    drafter = Joint(runner_up=3)
    drafter.begin([1, 2])
    tree = drafter.propose([1, 2], FAR)
    assert len(tree) == 0
    drafter.observe(StepResult(2, tree, None, [], [3], [[3, 8, 9]]))
    drafter.propose([1, 2, 3], FAR)
    assert [token for _, token in drafter.following([2])] == [3, 8, 9]
    assert [token for _, token in drafter.following([2, (1 << 20) | 2])] == [3, 8, 9]
    drafter.reset()
    drafter.begin([1, 2])
    assert drafter.following([2]) == []


def test_a_source_is_scored_by_its_tokens_before_the_step():
    drafter = Joint(runner_up=2, history=False)
    drafter.begin([1, 2])
    before = [list(counts) for counts in drafter._hits[RUNNERS_UP][0]]
    tree = drafter.propose([1, 2], FAR)
    drafter.observe(StepResult(2, tree, None, [], [3], [[3, 8]]))
    assert drafter._hits[RUNNERS_UP][0] == before, "the base's own top tokens of this step are not a guess"
    drafter.begin([1, 2])
    tree = drafter.propose([1, 2], FAR)
    drafter.observe(StepResult(2, tree, None, [], [8], [[8, 3], *([0, 1] for _ in tree.tokens)]))
    (reads, hits), *_ = drafter._hits[RUNNERS_UP][1]
    assert (reads, hits) == (3, 2), "8 was its second guess"


def test_a_corpus_is_read_after_the_texts_and_its_ranks_are_learned():
    corpus = CorpusTable(*count(np.array([1, 2, 3, 4, 5] * 5 + [1, 2, 8, 4, 5] * 3, dtype=np.int32), 2, 20))
    drafter = Joint(runner_up=0, history=False, corpus=corpus)
    drafter.begin([7, 1, 2])
    assert [token for _, token in drafter.following(drafter._keys)] == [3, 8]
    drafter.propose([7, 1, 2, 8], FAR)
    drafter.begin([7, 1, 2])  # only how often each rank was right is kept from the previous text
    assert [token for _, token in drafter.following(drafter._keys)] == [8, 3]


def test_rows_of_a_tree_that_was_pruned_are_not_learned():
    drafter = Joint(runner_up=3)
    drafter.begin([1, 2, 1])
    drafter.propose([1, 2, 1], FAR)
    drafter.observe(StepResult(1, DraftTree(), None, [], [2], [[3, 8, 9]]))
    assert drafter._runners_up == ({}, {})


# ---- the tree


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("num_nodes", "least"), [(1, 0.02), (5, 0.02), (12, 0.1), (40, 0.01)])
def test_the_tree_is_the_most_probable_nodes(seed, num_nodes, least):
    text = markov_text(random.Random(seed), 80)
    drafter = Joint(num_nodes=num_nodes, min_probability=least, runner_up=0)
    drafter.begin(text[:20])
    for length in range(21, 80):
        tree = drafter.propose(text[:length], Limits(max_depth=6, eos=frozenset({3})))
    probability = {}

    def expand(path, keys, above):
        if len(path) == 6 or (path and path[-1] == 3):
            return
        for p, token in drafter.following(keys):
            if above * p >= least:
                probability[(*path, token)] = above * p
                expand((*path, token), extended(keys, token, drafter.order), above * p)

    expand((), drafter._keys, 1.0)
    check_tree(tree, 9)
    drafted = [probability[tuple(tree.path_tokens(node))] for node in range(len(tree))]
    best = sorted(probability.values(), reverse=True)[:num_nodes]
    assert drafted == pytest.approx(best)
    assert len(tree) == min(num_nodes, len(probability))


# ---- history and rewinds


def steps_of(drafter, runner, prompt):
    return len(Session(runner, drafter).run(prompt, 60).steps)


def test_history_makes_a_repeated_text_faster_until_the_drafter_is_reset(pseudo_runner):
    drafter = Joint(runner_up=0)
    first = steps_of(drafter, pseudo_runner(3), [1, 2])
    again = steps_of(drafter, pseudo_runner(3), [1, 2])
    assert again < first
    drafter.reset()
    assert steps_of(drafter, pseudo_runner(3), [1, 2]) == first
    forgetful = Joint(runner_up=0, history=False)
    for _ in range(2):
        counts = steps_of(forgetful, pseudo_runner(3), [1, 2])
    assert counts >= again


def test_rewound_text_is_no_longer_the_context():
    drafter, text = Joint(runner_up=0), markov_text(random.Random(2), 40)
    drafter.begin(text[:20])
    drafter.propose(text, FAR)
    drafter.rewind(25)
    assert drafter._text == text[:25]
    drafter.propose([*text[:25], 4, 5], FAR)
    assert drafter._keys == [5, (4 << 20) | 5, (text[24] << 40) | (4 << 20) | 5]


def test_what_is_remembered_of_a_corpus_is_bounded_and_changes_no_tree(monkeypatch):
    corpus = CorpusTable(*count(np.array([1, 2, 3, 4, 5] * 5 + [1, 2, 8, 4, 5] * 3, dtype=np.int32), 2, 20))
    text, trees, sizes = [1, 2, 3, 4, 5, 1, 2, 8, 4, 5, 1, 2], [], []
    for limit in (1_000_000, 2):
        monkeypatch.setattr(joint, "MAX_PAIRS", limit)
        drafter = Joint(runner_up=0, history=False, corpus=corpus)
        drafter.begin(text[:1])
        for end in range(2, len(text)):
            drafter.observe(StepResult(1, DraftTree(), None, [], text[end - 1 : end], []))
            trees.append(drafter.propose(text[:end], FAR))
        sizes.append(max(map(len, drafter._corpus_followers)))
    assert trees[: len(text) - 2] == trees[len(text) - 2 :] and sizes[1] <= 2 < sizes[0]
