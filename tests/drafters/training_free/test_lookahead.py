"""Lookahead decoding in the real loop, against a literal version in plain loops without trees or sessions."""

import random

import pytest

from drafters import Limits, Lookahead, NgramPool, StepResult
from inference.verifier.draft_model import DraftModelSession
from inference.verifier.session import Session
from tests.drafters.training_free.oracles import PlainPool, held

FAR = Limits(max_depth=100)
PARAMETERS = [
    {},
    {"level": 3, "window": 1, "guesses": 1},
    {"level": 3, "window": 4, "guesses": 2, "seed": 5},
    {"level": 4, "window": 3, "guesses": 2, "drop_last": True},
    {"level": 4, "window": 1, "guesses": 0},
    {"level": 5, "window": 2, "guesses": 3, "pool_from_prompt": True},
    {"level": 6, "window": 5, "guesses": 4, "drop_last": True, "pool_from_prompt": True},
    {"level": 7, "window": 10, "guesses": 0, "pool_from_prompt": True},
]


class Literal:
    """The algorithm on lists: the window's levels, the n-grams of each key, and every visible path as a list."""

    def __init__(self, base, level=5, window=7, guesses=7, pool_from_prompt=False, drop_last=False, seed=0):
        self.base, self.N, self.W, self.G = base, level, window, guesses
        self.pool_from_prompt, self.drop_last, self.seed = pool_from_prompt, drop_last, seed

    def begin(self, prompt):
        rng = random.Random(self.seed)
        self.seq, self.pool = list(prompt), PlainPool(self.G)
        self.win = [[rng.choice(prompt) for _ in range(self.W + self.N - 3)]] + [None] * (self.N - 2)
        self.fill = 0
        if self.pool_from_prompt:
            for i in range(len(prompt) - self.N + 1):
                self.pool.insert(prompt[i], prompt[i + 1 : i + self.N])

    def step(self, end, eos=()):
        seq, win, N, W, fill = self.seq, self.win, self.N, self.W, self.fill
        root, full = seq[-1], fill == N - 2
        first = self.base.next(seq)
        inp = []
        for i in range(len(win[fill])):
            visible = win[0][: i + 1] if fill == 0 else win[0][:i] + [win[level][i] for level in range(1, fill + 1)]
            inp.append(self.base.next(seq + visible))
        emitted = [first]
        for gram in self.pool.newest(root) if full else []:
            res = [self.base.next(seq + list(gram[: k + 1])) for k in range(N - 1)]
            gg = 0
            while gg < N - 1 - self.drop_last and gram[gg] == [first, *res][gg]:
                gg += 1
            if gg > len(emitted) - 1:
                emitted = [first, *res[:gg]]
        if full:
            assert len(win[0]) == W - 1
            assert all(len(win[level]) == W for level in range(1, N - 1))
            self.pool.insert(root, [win[level][0] for level in range(1, N - 1)] + [inp[0]])
            for i in range(1, W):
                self.pool.insert(win[0][i - 1], [win[level][i] for level in range(1, N - 1)] + [inp[i]])
            win[0] = win[1][1:]
            for level in range(1, N - 2):
                win[level] = win[level + 1]
            win[N - 2] = inp
        elif fill == 0:
            win[0], win[1], self.fill = win[0][1:], inp, 1
        else:
            for level in range(fill + 1):
                win[level] = win[level][1:]
            win[fill + 1], self.fill = inp[1:], fill + 1
        emitted = emitted[: end - len(seq)]
        for index, token in enumerate(emitted):
            if token in eos:
                emitted = emitted[: index + 1]
        for token in emitted:
            seq.append(token)
            if self.pool_from_prompt and len(seq) >= N:
                self.pool.insert(seq[-N], seq[1 - N :])
        return emitted


def observe_step(drafter, tree, after, emitted):
    """Let the drafter observe a step; ``after`` has the base's argmax at the root and at each node."""
    drafter.observe(StepResult(1, tree, None, [], emitted, [[token] for token in after]))


@pytest.mark.parametrize("arguments", PARAMETERS)
@pytest.mark.parametrize("seed", range(5))
def test_lookahead_takes_the_steps_of_the_published_algorithm(pseudo_runner, arguments, seed):
    rng = random.Random(seed)
    runner = pseudo_runner(seed, vocab=8, order=rng.choice([1, 2]))
    drafter, literal = Lookahead(**arguments), Literal(runner, **arguments)
    session = Session(runner, drafter)
    gained = 0
    for length in (1, 2, 3, 17):  # a second text begins with an empty pool
        prompt = [rng.randrange(8) for _ in range(length)]
        session.begin(prompt)
        literal.begin(prompt)
        eos = frozenset(rng.sample(range(8), rng.choice([0, 0, 1])))
        end = length + 45
        while len(session.seq) < end and session.seq[length:][-1:] not in [[token] for token in eos]:
            emitted, cost = session.step(end, eos)
            drafter._read(session.seq)
            assert emitted == literal.step(end, eos)
            assert drafter._levels == [level for level in literal.win if level is not None]
            assert held(drafter._pool, 8) == held(literal.pool, 8)
            assert len(emitted) <= drafter.level - drafter.drop_last
            gained += cost.accepted
    assert gained or drafter.window == 1


class EmptyPool(NgramPool):
    """Keeps nothing."""

    def insert(self, key, gram):
        pass


@pytest.mark.parametrize(("level", "window"), [(3, 1), (5, 1), (5, 7), (4, 15)])
def test_with_an_empty_pool_the_steps_are_those_of_the_base_alone_with_the_whole_window(pseudo_runner, level, window):
    runner = pseudo_runner(vocab=8)
    result = Session(runner, Lookahead(level, window, pool=EmptyPool())).run([1, 2, 3], 40)
    assert result.tokens == runner.greedy([1, 2, 3], 40)
    assert [(step.emitted, step.fed_candidates) for step in result.steps] == [(1, 0)] * 40
    assert {step.fed_scratch for step in result.steps[level - 2 :]} == {window * (level - 1) - 1}


@pytest.mark.parametrize("limit", [{"max_nodes": 9}, {"max_scratch_depth": 5}])
def test_the_window_pauses_when_it_does_not_fit_and_continues_when_it_does(limit):
    drafter = Lookahead(level=4, window=5)
    drafter.begin([5, 6])
    drafter.propose([5, 6], FAR)
    drafter._levels = before = [[1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]
    drafter._pool.insert(6, (20, 21, 22))
    tree = drafter.propose([5, 6], Limits(100, **limit))
    assert (tree.tokens, tree.num_scratch) == ([20, 21, 22], 0)
    observe_step(drafter, tree, [1, 2, 3, 4], [1])
    assert drafter._levels == before
    assert held(drafter._pool, 20) == {6: [(20, 21, 22)]}
    tree = drafter.propose([5, 6], Limits(100, max_nodes=17, max_scratch_depth=6))
    assert tree.num_scratch == 14
    observe_step(drafter, tree, list(range(50, 50 + 18)), [50])
    assert drafter._levels == [[6, 7, 8, 9], [10, 11, 12, 13, 14], [63, 64, 65, 66, 67]]


def test_a_pruned_window_is_ignored():
    drafter = Lookahead(level=4, window=3)
    drafter.begin([5])
    tree = drafter.propose([5], FAR)
    observe_step(drafter, tree.pruned(100, 2, ()), [10, 11, 12], [10])
    assert drafter._levels == [[5, 5, 5, 5]]


def test_with_few_nodes_the_newest_guesses_are_drafted():
    drafter = Lookahead(level=3, window=1)
    drafter.begin([5])
    drafter._levels = [[], [1]]
    for gram in ((1, 2), (3, 4), (1, 5)):
        drafter._pool.insert(5, gram)
    assert drafter.propose([5], Limits(100, max_nodes=4)).tokens == [1, 5, 3, 4]
    assert drafter.propose([5], Limits(100, max_nodes=2)).tokens == [1, 5]
    assert drafter._pool.newest(5) == [(1, 2), (3, 4), (1, 5)], "shortened n-grams are not stored"


def test_a_pool_of_its_own_is_cleared_with_each_text_and_a_shared_one_is_not(pseudo_runner):
    shared = NgramPool(7)
    for drafter, survives in ((Lookahead(), False), (Lookahead(pool=shared), True)):
        Session(pseudo_runner(), drafter).run([1, 2, 3], 40)
        before = held(drafter._pool, 12)
        assert before
        drafter.begin([1, 2, 3])
        assert held(drafter._pool, 12) == (before if survives else {})
        drafter.reset()
        assert held(drafter._pool, 12) == {}
    assert drafter._pool is shared


def test_text_that_replaces_a_rejected_draft_is_read_too():
    drafter = Lookahead(level=3, pool_from_prompt=True)
    drafter.begin([1, 2])
    drafter.propose([1, 2, 3, 4, 5], FAR)
    drafter.rewind(3)
    drafter.propose([1, 2, 3, 6, 7], FAR)
    assert [drafter._pool.newest(key) for key in (1, 2, 3)] == [[(2, 3)], [(3, 4), (3, 6)], [(4, 5), (6, 7)]]


@pytest.mark.parametrize("pool_from_prompt", [False, True])
def test_inside_a_draft_model_the_window_keeps_sliding_when_drafts_are_rejected(pseudo_runner, pool_from_prompt):
    rng = random.Random(0)
    runner = pseudo_runner(vocab=8)
    drafter = Lookahead(4, 3, 4, pool_from_prompt=pool_from_prompt)
    inner = DraftModelSession(runner, drafter)
    seq, refused = [1, 2, 3], 0
    inner.begin(seq)
    for _ in range(40):
        levels = drafter._levels
        inner.session.drafter.rewind(1)
        assert drafter._levels == levels
        draft = inner.write(seq, 5).tokens
        assert draft == runner.greedy(seq, 5)
        kept = rng.randrange(6)
        refused += kept < 5
        seq = seq + draft[:kept] + [rng.randrange(8)]
    assert refused
    assert inner.forwards < 40 * 5
