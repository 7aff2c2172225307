"""Self-Draft in the real loop, against a literal version in plain loops without trees or sessions."""

import random

import numpy as np
import pytest

from drafters import CorpusCache, SelfDraft
from drafters.training_free.corpus import CorpusTable
from inference.indexes import count
from inference.verifier.draft_model import DraftModelSession
from inference.verifier.session import Session
from tests.drafters.training_free.oracles import PlainCorpus, PlainPool, held

PARAMETERS = [
    {},
    {"branch_len": 5, "num_branches": 3, "max_pad": 1},
    {"branch_len": 5, "gram": 4, "num_branches": 4, "max_pad": 3, "cache_size": 3},
    {"branch_len": 7, "gram": 3, "num_branches": 2, "drop_last": True},
    {"branch_len": 3, "gram": 2, "num_branches": 1, "cache_size": 2},
    {"branch_len": 3, "gram": 4},
    {"branch_len": 4, "gram": 1, "num_branches": 5, "seed": 3},
    {"branch_len": 6, "text_ngrams": False},
    {"branch_len": 8, "gram": 2, "text_ngrams": False, "drop_last": True, "cache_size": 4},
]


class Literal:
    """Self-Draft after the reference code, with pads, levels and n-grams in lists and an explicit path per token."""

    def __init__(
        self,
        base,
        branch_len=6,
        num_branches=6,
        gram=4,
        max_pad=2,
        cache_size=10,
        text_ngrams=True,
        drop_last=False,
        seed=0,
        corpus=None,
    ):
        self.base, self.L, self.N, self.g = base, branch_len, num_branches, min(gram, branch_len - 1)
        self.max_pad, self.cap = max_pad, cache_size
        self.text_ngrams, self.drop_last, self.seed, self.corpus = text_ngrams, drop_last, seed, corpus
        self.cache, self.texts = PlainPool(cache_size), 0

    def decode(self, prompt, length, eos=()):
        """Yield the branches, the candidates, the emitted tokens and the cache of each step."""
        L, N, base = self.L, self.N, self.base
        if self.texts and self.texts % 2 == 0:
            self.cache.keep_newest(2)
        self.texts += 1
        rng, seq, learned = random.Random(self.seed), list(prompt), 0
        aux = []
        for i in range(N + L - 3):
            aux.append(rng.choices(prompt, k=1 if i < L - 2 else rng.randint(1, self.max_pad)))
        levels = []
        end = min(len(prompt) + length, base.context_length)
        while len(seq) < end:

            def argmax(path, seq=seq):
                return base.next(seq + path)

            if not levels:
                branches = [list(pads) for pads in aux]
            else:
                branches = [[level[0] for level in levels]]
                branches += [pads + [level[1 + j] for level in levels] for j, pads in enumerate(aux)]
            last = [argmax(branch) for branch in branches]
            fits = len(seq) + max(len(branch) for branch in branches) <= base.context_length
            candidates = []
            if len(levels) == L - 2 or not fits:
                candidates = list(self.cache.newest(seq[-1]))
                if self.corpus:
                    quota = 2 if len(candidates) == self.cap else min(3, self.cap - len(candidates))
                    candidates += self.corpus.retrieve(seq, quota, candidates)
            if not fits:
                branches = []
            elif not levels:
                aux.pop(0)
                levels.append(last)
            elif len(levels) < L - 2:
                aux.pop(0)
                levels = [level[1:] for level in levels] + [last[1:]]
            else:
                self.learn(seq, learned, branches, argmax)
                learned = len(seq)
                aux = [[*pads[1:], levels[0][1 + j]] for j, pads in enumerate(aux)]
                levels = [*levels[1:], last]
            drafts = [gram[: len(gram) - self.drop_last][: end - len(seq) - 1] for gram in candidates]
            best = 0
            for draft in drafts:
                agreed = 0
                while agreed < len(draft) and argmax(list(draft[:agreed])) == draft[agreed]:
                    agreed += 1
                    if draft[agreed - 1] in eos:
                        break
                best = max(best, agreed)
            emitted = []
            while len(emitted) < best + 1:
                emitted.append(argmax(emitted))
                if emitted[-1] in eos:
                    break
            yield branches, drafts, emitted, self.cache
            seq = seq + emitted
            if emitted[-1] in eos:
                return

    def learn(self, seq, learned, branches, argmax):
        g = self.g
        longest = max(len(branch) for branch in branches)
        for level in range(longest - g + 1):  # branches end at the same level
            for branch in branches[1:]:
                k = level - (longest - len(branch))
                if k >= 0:
                    self.cache.insert(branch[k], (*branch[k + 1 : k + g], argmax(branch[: k + g])))
        first = max(0, learned - g) if self.text_ngrams else len(seq) - 1
        for i in range(first, len(seq)):
            if i + g < len(seq):
                self.cache.insert(seq[i], tuple(seq[i + 1 : i + 1 + g]))
            else:
                following = seq[i + 1 :]
                borrowed = branches[0][: g - 1 - len(following)]
                self.cache.insert(seq[i], (*following, *borrowed, argmax(borrowed)))
        for k in range(len(branches[0]) - g + 1):
            self.cache.insert(branches[0][k], (*branches[0][k + 1 : k + g], argmax(branches[0][: k + g])))


class Watched(SelfDraft):
    """Keeps the tree of the latest step."""

    def observe(self, step):
        self.tree = step.tree
        super().observe(step)


def chains(tree):
    """Return the scratch chains of a tree."""
    nodes = range(tree.num_candidates, len(tree))
    return [tree.path_tokens(node) for node in nodes if node not in tree.parents]


def prefixes(drafts, eos=()):
    """Return every prefix of these drafts; nothing follows an end token."""
    spelled = {tuple(draft[:n]) for draft in drafts for n in range(1, len(draft) + 1)}
    return {path for path in spelled if not set(path[:-1]) & set(eos)}


def spelled(tree):
    return [tuple(tree.path_tokens(node)) for node in range(tree.num_candidates)]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", PARAMETERS, ids=str)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("with_corpus", [False, True])
def test_each_step_equals_that_of_the_literal_version(pseudo_runner, arguments, seed, with_corpus):
    vocab = (4, 9, 30)[seed % 3]
    runner = pseudo_runner(seed, vocab, order=1 + seed % 2, context=60, noise=0.2)
    rng = random.Random(seed)
    eos = {vocab - 1} if seed % 2 else set()
    corpus = PlainCorpus(runner.greedy([0], 150) + runner.greedy([1], 150)) if with_corpus else None
    drafter, literal = Watched(**arguments, corpus=corpus), Literal(runner, **arguments, corpus=corpus)
    session, steps, hits = Session(runner, drafter), 0, 0
    texts = (1, 3, 17, 30, 8) * (
        3 if eos else 1
    )  # some texts reach the end of the context, and the cache is thinned out in between
    for length in texts:
        prompt = [rng.randrange(vocab) for _ in range(length)]
        run = literal.decode(prompt, 35, eos)
        for emitted, _ in session.decode(prompt, 35, frozenset(eos)):
            branches, drafts, expected, cache = next(run)
            assert emitted == expected
            assert chains(drafter.tree) == branches
            assert sorted(spelled(drafter.tree)) == sorted(prefixes(drafts, eos))
            assert held(drafter.cache, vocab) == held(cache, vocab)
            steps += 1
            hits += len(emitted) > 1
        assert next(run, None) is None
    assert steps > 20
    assert hits or eos or vocab == 30


def test_an_empty_corpus_changes_no_step_and_a_corpus_alone_feeds_no_branches(pseudo_runner):
    runner, prompt = pseudo_runner(0), [1, 2, 3]
    texts = [], runner.greedy(prompt, 60)
    empty, filled = (CorpusTable(*count(np.array(text, dtype=np.int32), 1, 20)) for text in texts)

    def steps(drafter):
        done = Session(runner, drafter).run(prompt, 60).steps
        return [(step.emitted, step.fed_candidates, step.fed_scratch) for step in done]

    assert steps(SelfDraft(corpus=empty)) == steps(SelfDraft())
    assert len(steps(SelfDraft(corpus=filled))) < len(steps(SelfDraft()))
    assert {scratch for *_, scratch in steps(CorpusCache(filled))} == {0} and len(steps(CorpusCache(filled))) < 60


def test_the_context_cache_is_thinned_out_at_every_second_text_and_cleared_by_reset(pseudo_runner):
    drafter = SelfDraft()
    session = Session(pseudo_runner(0, vocab=6), drafter)
    for text in range(2):
        session.run([text, 1, 2], 50)
    assert max(len(grams) for grams in held(drafter.cache, 6).values()) > 2
    newest = {key: grams[-2:] for key, grams in held(drafter.cache, 6).items()}
    assert all(drafter.cache.newest(key, 0) == [] for key in newest)
    drafter.begin([1])
    assert held(drafter.cache, 6) == newest
    drafter.begin([1])
    assert held(drafter.cache, 6) == newest
    drafter.reset()
    assert held(drafter.cache, 6) == {}
    for text in range(2):
        session.run([text, 1, 2], 50)
    assert {key: grams[-2:] for key, grams in held(drafter.cache, 6).items()} == newest, (
        "a reset drafter behaves like a new one"
    )


def test_a_draft_model_with_self_draft_is_lossless_after_rejections_too(pseudo_runner):
    runner, drafter = pseudo_runner(3, vocab=6), SelfDraft(cache_size=1000)
    inner, seq = DraftModelSession(runner, drafter), [1, 2, 3]
    inner.begin(seq)
    rng = random.Random(0)
    for _ in range(30):
        answer = inner.write(seq, 8).tokens
        assert answer == runner.greedy(seq, 8)
        seq = seq + answer[: rng.randrange(9)] + [rng.randrange(6)]
    inner.write(seq, 8)
    assert all(tuple(seq[i + 1 : i + 5]) in drafter.cache.newest(seq[i]) for i in range(len(seq) - 4))


def test_with_few_nodes_the_branches_stay_complete_and_candidates_take_the_rest(pseudo_runner):
    drafter = SelfDraft()
    steps = Session(pseudo_runner(0, vocab=5), drafter, max_nodes=40).run([1, 2, 3], 60).steps[4:]
    (size,) = {step.fed_scratch for step in steps}
    assert 29 <= size <= 34
    assert max(step.fed_candidates for step in steps) == 40 - size
