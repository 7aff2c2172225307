"""Ouroboros, against plain loops from section 3 of its paper: the tokens and the phrases of each step."""

import random

import pytest

from drafters import DraftTree, Lookahead, Ouroboros
from drafters.protocol import Limits, StepResult
from drafters.training_free.draft_model import DraftedTokens, DraftSession
from drafters.training_free.ngram import NgramPool
from inference.verifier.draft_model import DraftModelSession
from inference.verifier.session import Session, acceptance_length
from tests.drafters.training_free.oracles import PlainPool, held

NO_EOS = frozenset()
VOCAB = 6


class Book(PlainPool):
    """A pool of phrases that counts what was learned."""

    learned = corrected = 0


def until_eos(tokens, eos):
    ends = [index for index, token in enumerate(tokens) if token in eos]
    return tokens[: ends[0] + 1] if ends else tokens


def matching(left, right):
    return [*(token == other for token, other in zip(left, right, strict=False)), False].index(False)


def plain(base, write, prompt, length, book, gamma, count, level, eos=NO_EOS, lengthen=True, verify=True, drop=False):
    """Yield the tokens of each step. ``write`` is the greedy draft model; ``base`` gives the token after a text."""
    seq, end = list(prompt), len(prompt) + length
    while len(seq) < end and (len(seq) == len(prompt) or seq[-1] not in eos):
        room = end - len(seq) - 1
        draft = write(seq, min(gamma, room), eos) if room else []
        v = [base(seq + draft[:i]) for i in range(len(draft) + 1)]
        accepted = matching(draft, v)
        if accepted < len(draft):  # the tail is discarded; the part that the base agrees with is learned
            emitted = v[: accepted + 1]
            tail = draft[accepted:]
            matches = [token == other for token, other in zip(tail, v[accepted:], strict=False)]
            for a in range(len(tail) if verify else 0):
                segment = tail[a : a + [*matches[a : a + level], False].index(False)]
                if len(segment) > 1:
                    book.insert(segment[0], segment[1:])
                    book.learned += 1
        else:
            hung = lengthen and draft and draft[-1] not in eos
            phrases = book.newest(draft[-1])[-count:] if hung else []
            decisions = []  # of each phrase: number of right tokens, the drafted tokens, the base's tokens instead
            for phrase in phrases:
                fed = until_eos(list(phrase[: len(phrase) - drop])[: room - len(draft)], eos)
                says = [base(seq + draft + fed[:i]) for i in range(len(fed) + 1)]
                decisions.append((matching(fed, says), fed, says))
            right, fed, says = best = max(decisions, key=lambda decisions: decisions[0], default=(0, [], v[-1:]))
            emitted = until_eos(draft + fed[:right] + [says[right]], eos)
            better = []
            for phrase, (right, fed, says) in zip(phrases, decisions, strict=True):
                better.append(phrase)
                if len(fed) >= len(phrase) - 1 and not (right and says is best[2]):
                    better[-1] = tuple(says[: len(phrase)])
            if verify and phrases:
                book.corrected += better != phrases
                book.replace_newest(draft[-1], better)
        seq += emitted
        yield emitted


class PlainLookahead:
    """A draft model with lookahead decoding, after its paper: the levels of a window in lists."""

    def __init__(self, model, level, window, book, first):
        self.model, self.level, self.book, self.forwards = model, level, book, 0
        self.win = [[first] * (window + level - 3)]  # sampled from a prompt of one token

    def write(self, seq, num_tokens, eos):
        text = list(seq)
        while len(text) < len(seq) + num_tokens and (len(text) == len(seq) or text[-1] not in eos):
            text += self.step(text, len(seq) + num_tokens - len(text) - 1, eos)
        return text[len(seq) :]

    def step(self, text, room, eos):
        self.forwards += 1
        win, root, model = self.win, text[-1], self.model
        full = len(win) == self.level - 1
        emitted = [model(text)]
        for phrase in list(self.book.newest(root)) if full else []:
            fed = until_eos(list(phrase)[:room], eos)
            says = [model(text + fed[:i]) for i in range(len(fed) + 1)]
            right = matching(fed, says)
            emitted = max(emitted, until_eos(says[: right + 1], eos), key=len)
        if len(win) == 1:
            after = [model(text + win[0][: i + 1]) for i in range(len(win[0]))]
            self.win = [win[0][1:], after]
            return emitted
        teeth = [[level[i] for level in win[1:]] for i in range(len(win[0]) + 1)]
        after = [model(text + win[0][:i] + tooth) for i, tooth in enumerate(teeth)]
        if full:
            for key, tooth, token in zip([root, *win[0]], teeth, after, strict=True):
                self.book.insert(key, [*tooth, token])
            self.win = [win[1][1:], *win[2:], after]
        else:
            self.win = [*(level[1:] for level in win), after[1:]]
        return emitted


def world(pseudo_runner, seed, disagreement=0.15):
    """A base, and a draft model that mostly agrees with it."""
    return pseudo_runner(seed, vocab=VOCAB, noise=disagreement), pseudo_runner(seed, vocab=VOCAB, noise=0.02)


def filled(most, level, texts, seed=0):
    """The same phrases in a pool and in a book: some from these texts, some random."""
    rng, pool, book = random.Random(seed), NgramPool(most), Book(most)
    for text in texts:
        for start in range(0, len(text) - level + 1, 2):
            phrase = [token if rng.random() < 0.9 else rng.randrange(VOCAB) for token in text[start : start + level]]
            pool.insert(phrase[0], phrase[1:])
            book.insert(phrase[0], phrase[1:])
    return pool, book


def decisions(tree, says):
    """The step result of a tree when the base predicts ``says[0]`` at the root and ``says[1 + i]`` at node i."""
    path, node, emitted = [], -1, [says[0]]
    while (child := tree.child(node, emitted[-1])) is not None:
        path.append(child)
        node = child
        emitted.append(says[1 + child])
    return StepResult(1, tree, None, path, emitted, [[token] for token in says])


class Pen(DraftSession):
    """Writes a given draft."""

    forwards, remembers, samples_drafts = 0, False, False

    def __init__(self, draft):
        self.draft, self.calls = draft, []

    def begin(self, prompt):
        self.calls.append("begin")

    def write(self, seq, num_tokens, eos=NO_EOS, threshold=0.0):
        return DraftedTokens(until_eos(self.draft[:num_tokens], eos), [])

    def rewind(self, length):
        self.calls.append(length)

    def reset(self):
        self.calls.append("reset")


def pool_of(*phrases):
    pool = NgramPool()
    for key, *phrase in phrases:
        pool.insert(key, phrase)
    return pool


# ---- against the plain loops


SIZES = [(1, 3, 3), (4, 1, 3), (4, 3, 4), (7, 3, 5), (12, 5, 7), (12, 3, 3), (4, 3, 6), (3, 3, 7)]  # gamma, K, level


@pytest.mark.slow
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize(("gamma", "count", "level"), SIZES)
@pytest.mark.parametrize("eos", [NO_EOS, frozenset({4})])
def test_each_step_and_each_phrase_equal_those_of_the_paper(pseudo_runner, gamma, count, level, eos, drop):
    books, lengthened = [], 0
    for seed in range(6):
        base, draft = world(pseudo_runner, seed)
        texts = [base.greedy([start], 40) for start in range(4)]
        pool, book = filled(8, level, texts, seed)
        books.append(book)
        session = Session(base, Ouroboros(DraftModelSession(draft), pool, gamma, count, level, drop_last=drop))
        for start in (4, 5):  # the second text starts with the phrases of the first
            prompt = [start, seed % VOCAB]
            expected = plain(base.next, draft.greedy, prompt, 60, book, gamma, count, level, eos, drop=drop)
            for (emitted, cost), wanted in zip(session.decode(prompt, 60, eos), expected, strict=True):
                assert emitted == wanted
                assert held(pool, VOCAB) == held(book, VOCAB)
                lengthened += cost.accepted > gamma
            assert session.seq[len(prompt) :] == base.greedy(prompt, 60, eos)
    assert lengthened, "some tails should be accepted"
    assert sum(book.corrected for book in books) > 5
    assert sum(book.learned for book in books) > 2 or gamma < 4


@pytest.mark.slow
@pytest.mark.parametrize("eos", [NO_EOS, frozenset({4})])
@pytest.mark.parametrize(("gamma", "count", "level", "window"), [(3, 2, 3, 4), (7, 3, 4, 5), (12, 3, 5, 6)])
def test_all_four_parts_together_equal_the_paper(pseudo_runner, gamma, count, level, window, eos):
    lengthened = quick = learned = 0
    for seed in range(5):
        base, draft = world(pseudo_runner, seed)
        pool, book = NgramPool(window), Book(window)
        inner = DraftModelSession(draft, Lookahead(level, window, window, pool=pool))
        session = Session(base, Ouroboros(inner, pool, gamma, count, level))
        for start in (5, 3):
            plainly = PlainLookahead(draft.next, level, window, book, start)
            expected = plain(base.next, plainly.write, [start], 80, book, gamma, count, level, eos)
            forwards = 0
            for (emitted, cost), wanted in zip(session.decode([start], 80, eos), expected, strict=True):
                assert emitted == wanted
                assert held(pool, VOCAB) == held(book, VOCAB)
                forwards += cost.draft_forwards
                assert forwards == plainly.forwards
                lengthened += cost.accepted > gamma
                quick += cost.draft_forwards < min(gamma, cost.fed_candidates)
            assert session.seq[1:] == base.greedy([start], 80, eos)
        learned += book.learned
    assert quick and learned and (lengthened or eos)


@pytest.mark.parametrize(("lengthen", "verify"), [(False, False), (False, True), (True, False)])
def test_each_part_can_be_switched_off(pseudo_runner, lengthen, verify):
    for seed in range(4):
        base, draft = world(pseudo_runner, seed)
        pool, book = filled(8, 4, [base.greedy([start], 40) for start in range(4)], seed)
        session = Session(base, Ouroboros(DraftModelSession(draft), pool, 7, 3, 4, lengthen, verify))
        expected = plain(base.next, draft.greedy, [4, 1], 80, book, 7, 3, 4, NO_EOS, lengthen, verify)
        for (emitted, cost), wanted in zip(session.decode([4, 1], 80), expected, strict=True):
            assert emitted == wanted
            assert held(pool, VOCAB) == held(book, VOCAB)
            assert lengthen or cost.fed_candidates <= 7
        assert bool(book.learned) == verify
        assert bool(book.corrected) == (lengthen and verify)


@pytest.mark.parametrize("lengthen", [True, False])
def test_behind_a_perfect_draft_model_tokens_are_accepted_beyond_the_draft(pseudo_runner, lengthen):
    base, draft, pool = pseudo_runner(0), pseudo_runner(0), NgramPool(6)
    inner = DraftModelSession(draft, Lookahead(4, 6, 6, pool=pool))
    *steps, _ = Session(base, Ouroboros(inner, pool, 5, 3, 4, lengthen)).run([4, 1], 80).steps  # the end cuts the last
    assert acceptance_length([steps]) > 6 if lengthen else {step.emitted for step in steps} == {6}


# ---- by hand


def test_nothing_is_learned_from_a_tree_that_the_caller_pruned():
    pool = pool_of((7, 1, 1, 1))
    drafter = Ouroboros(Pen([6, 7]), pool, num_draft=2, level=4)
    tree = drafter.propose([1], Limits(20))
    drafter.observe(decisions(DraftTree(tree.tokens[:3], tree.parents[:3]), [6, 7, 2, 2]))
    assert pool.newest(7) == [(1, 1, 1)]


# ---- several texts in a row


def test_phrases_are_kept_between_texts_if_history_is_on():
    for history in (True, False):
        pool, pen = pool_of((7, 1, 2)), Pen([])
        Ouroboros(pen, pool, history=history).begin([1])
        assert pool.newest(7) == ([(1, 2)] if history else [])
        assert pen.calls == ["begin"]
