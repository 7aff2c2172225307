"""The n-gram drafters, against slow literal versions of their published rules."""

import random

import pytest

from drafters.protocol import Limits
from drafters.training_free.ngram import ANPD, PromptLookup
from inference.chat import ChatSession
from inference.evaluate.figures import count_drafts
from inference.verifier.session import Session, acceptance_length

FAR = Limits(max_depth=100)


def words(rng, length, vocab):
    return [rng.randrange(vocab) for _ in range(length)]


def chain(tree):
    assert list(tree.parents) == list(range(-1, len(tree) - 1))
    return list(tree.tokens)


class SlowANPD:
    """Algorithms 1 and 2 of the ANPD paper: one table for each order, counted once (the last of equals wins)."""

    def __init__(self, order, num_draft, multi_level=True):
        self.order, self.num_draft, self.multi_level = order, num_draft, multi_level

    def begin(self, prompt):
        self.text, self.tables = [], {n: {} for n in range(2, self.order + 1)}
        self.read(prompt)

    def read(self, tokens):
        for token in tokens:
            self.text.append(token)
            i = len(self.text) - 1
            for n in range(2, self.order + 1):
                if i >= n - 1:
                    key = tuple(self.text[i - n + 1 : i])
                    counts = self.tables[n].setdefault(key, {})
                    counts[token] = counts.get(token, 0) + 1

    def ask(self, history):
        for n in range(self.order, 1, -1) if self.multi_level else [self.order]:
            counts = self.tables[n].get(tuple(history[-(n - 1) :])) if len(history) >= n - 1 else None
            if counts:
                best = None
                for token, count in counts.items():
                    if best is None or count >= counts[best]:
                        best = token
                return best
        return None

    def draft(self, seq, eos=()):
        history, draft = list(seq), []
        for _ in range(self.num_draft):
            token = self.ask(history)
            if token is None:
                break
            draft.append(token)
            history.append(token)
            if token in eos:
                break
        return draft


def slow_prompt_lookup(seq, max_ngram, num_draft):
    """transformers' PromptLookupCandidateGenerator without its cut before EOS."""
    for n in range(min(max_ngram, len(seq) - 1), 0, -1):
        key = seq[-n:]
        for i in range(len(seq) - n + 1):
            if seq[i : i + n] == key:
                start = i + n
                end = min(start + num_draft, len(seq))
                if start < end:
                    return seq[start:end]
    return []


class Watched(list):
    """A text that counts reads of its tokens."""

    read = 0

    def __getitem__(self, key):
        item = super().__getitem__(key)
        self.read += len(item) if isinstance(key, slice) else 1
        return item

    def __iter__(self):
        raise AssertionError("a step walks through the whole text")


EVERY = [
    ("anpd", lambda: ANPD(order=4, num_draft=6)),
    ("anpd of order 2", lambda: ANPD(order=2, num_draft=3)),
    ("anpd without levels", lambda: ANPD(order=3, num_draft=6, multi_level=False)),
    ("prompt lookup", lambda: PromptLookup(3, 5)),
]
each_drafter = pytest.mark.parametrize("make", [make for _, make in EVERY], ids=[name for name, _ in EVERY])


@pytest.mark.parametrize("multi_level", [True, False])
@pytest.mark.parametrize("order", [2, 3, 5])
@pytest.mark.parametrize("seed", range(8))
def test_anpd_drafts_the_tokens_of_its_tables(order, seed, multi_level):
    rng = random.Random(seed)
    fast, slow = (kind(order, num_draft=6, multi_level=multi_level) for kind in (ANPD, SlowANPD))
    for _ in range(2):  # a second text must not depend on the first
        seq = words(rng, rng.choice([1, 2, 3, 30]), vocab=4)
        fast.begin(seq)
        slow.begin(seq)
        for _ in range(25):
            assert chain(fast.propose(seq, FAR)) == slow.draft(seq)
            emitted = words(rng, rng.randrange(1, 5), vocab=4)
            seq = seq + emitted
            slow.read(emitted)


def test_anpd_without_update_has_the_tables_of_the_latest_prompt_of_a_chat(pseudo_runner):
    drafter, prompt = ANPD(order=3, num_draft=2, update=False), [1, 2, 3, 1]
    chat = ChatSession(pseudo_runner(0, vocab=4), drafter)
    for num_cut in (0, 0, 5, 30):
        drafted = sum(step.fed_candidates for _, step in chat.decode(prompt, 20))
        fresh = ANPD(order=3, num_draft=2, update=False)
        fresh.begin(prompt)
        assert vars(drafter) | {"_length": 0} == vars(fresh) | {"_length": 0} and drafted
        prompt = [*chat.seq[: len(chat.seq) - num_cut], 3, 1]


@pytest.mark.parametrize("seed", range(4))
def test_alpha_times_num_draft_plus_1_is_the_acceptance_length_of_anpd(pseudo_runner, seed):
    """Section 4.5 of its paper: alpha is a share of K tokens per step, even where fewer could be drafted."""
    runner, slow, prompt, accepted = pseudo_runner(seed, vocab=6), SlowANPD(3, 6), [1, 2, 3], []
    slow.begin(prompt)
    truth = prompt + runner.greedy(prompt, 80)
    while following := truth[len(slow.text) :]:
        draft = slow.draft(slow.text)[: len(following) - 1]
        accepted.append([*map(int.__eq__, draft, following), False].index(False))
        slow.read(following[: accepted[-1] + 1])
    _, *decoded = accepted  # the first step is the prefill
    alpha, steps = sum(decoded) / (6 * len(decoded)), Session(runner, ANPD(order=3, num_draft=6)).run(prompt, 80).steps
    figures = count_drafts([steps]).figures()
    assert figures["accepted_per_step"] / 6 == pytest.approx(alpha)
    assert alpha * 6 + 1 == pytest.approx(acceptance_length([steps]))
    assert figures["draft_efficiency"] > alpha > 0, "the share of the drafted tokens is another figure"


@each_drafter
@pytest.mark.parametrize("vocab", [2, 4, 9])
def test_a_rewound_and_continued_text_leaves_no_trace(make, vocab):
    """An inner session does this: tokens that were not observed, cuts at any length, other tokens after them."""
    rng = random.Random(vocab)
    drafter = make()
    drafter.begin(seq := words(rng, 5, vocab))
    for _ in range(120):
        if rng.random() < 0.5:
            length = rng.randrange(max(5, len(seq) - 9), len(seq) + 1)
            drafter.rewind(length)
            del seq[length:]
        seq += words(rng, rng.randrange(4), vocab)
        fresh = make()
        fresh.begin(seq)
        assert chain(drafter.propose(seq, FAR)) == chain(fresh.propose(seq, FAR))
        drafter.rewind(len(seq) - 2)
        fresh = make()
        fresh.begin(seq[:-2])
        assert vars(drafter) == vars(fresh)


@each_drafter
def test_a_step_reads_only_the_end_of_the_text_and_what_it_copies(make):
    rng, drafter = random.Random(0), make()
    seq = Watched(words(rng, 3000, vocab=3))
    drafter.begin(list.copy(seq))
    for _ in range(20):
        seq += words(rng, 3, vocab=3)
        seq.read = 0
        assert chain(drafter.propose(seq, FAR))
        assert seq.read <= 3 + 4 + 6, "new tokens, the longest context, the longest copy"


@pytest.mark.parametrize("drafter", [ANPD(num_draft=7), PromptLookup(num_draft=7)])
@pytest.mark.parametrize("depth", [0, 1, 3, 50])
def test_drafts_end_at_their_limits(drafter, depth):
    seq = [1, 2, 3, 4] * 5
    drafter.begin(seq)
    assert len(drafter.propose(seq, Limits(max_depth=50, max_nodes=depth))) == min(depth, 7)
    assert chain(drafter.propose(seq, Limits(max_depth=depth))) == (seq + seq)[: min(depth, 7)]


@pytest.mark.parametrize(("max_ngram", "num_draft"), [(1, 3), (2, 10), (3, 10), (4, 2)])
@pytest.mark.parametrize("seed", range(5))
def test_prompt_lookup_copies_what_followed_the_leftmost_match(max_ngram, num_draft, seed):
    rng = random.Random(seed)
    drafter = PromptLookup(max_ngram, num_draft)
    for _ in range(2):
        seq = words(rng, rng.choice([1, 2, 3, 20]), vocab=5)
        drafter.begin(seq)
        for _ in range(25):
            depth = rng.choice([1, 2, 100])
            expected = slow_prompt_lookup(seq, max_ngram, num_draft)[:depth]
            assert chain(drafter.propose(seq, Limits(depth))) == expected
            seq = seq + words(rng, rng.randrange(1, 5), vocab=5)


@pytest.mark.parametrize("eos", [None, 3])
def test_prompt_lookup_agrees_with_transformers_own(eos):
    import torch
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    rng = random.Random(0)
    theirs = PromptLookupCandidateGenerator(
        eos_token_id=None if eos is None else torch.tensor([eos]),
        num_output_tokens=4,
        max_matching_ngram_size=3,
        max_length=1000,
    )
    limits = Limits(100, eos=frozenset([] if eos is None else [eos]))
    drafted = 0
    for _ in range(60):
        seq = words(rng, rng.randrange(2, 25), vocab=5)
        drafter = PromptLookup(max_ngram=3, num_draft=4)
        drafter.begin(seq[:1])
        candidates, _ = theirs.get_candidates(torch.tensor([seq]))
        assert chain(drafter.propose(seq, limits)) == candidates[0, len(seq) :].tolist()
        drafted += candidates.shape[1] > len(seq)
    assert drafted > 30
