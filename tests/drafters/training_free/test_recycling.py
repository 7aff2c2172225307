"""Token recycling in the real loop, against a literal version in plain loops, and its tree against enumeration."""

import random
from itertools import product
from math import prod

import pytest
import torch

from drafters import TokenRecycling
from drafters.training_free.recycling import best_first, rank_probability
from inference.verifier.runner import ForwardOutput
from inference.verifier.session import Session


@pytest.fixture
def ranked(pseudo_runner):
    """Build a pseudo-base that ranks its full vocabulary, its next token first."""

    class Ranked(pseudo_runner):
        def rank(self, seq):
            rest = list(range(self.vocab_size))
            random.Random(str((self.seed, "rank", tuple(seq[-self.order :])))).shuffle(rest)
            first = self.next(seq)
            rest.remove(first)
            return [first, *rest]

        def forward(self, pending, tree, required_outputs):
            super().forward(pending, tree, required_outputs)
            text = self.text + list(pending)
            ranks = [self.rank(text + path) for path in ([], *map(tree.path_tokens, range(len(tree))))]
            logits = torch.empty(len(ranks), self.vocab_size)
            return ForwardOutput(
                logits.scatter_(1, torch.tensor(ranks), -torch.arange(self.vocab_size).float().expand_as(logits)), None
            )

    return Ranked


def slow_step(base, seq, table, template, top_k, eos, end):
    """One step with a dict of paths: draft along the most probable rank paths, compare, refill the table."""
    tokens = {(): seq[-1]}
    for path in template:
        above = tokens.get(path[:-1])
        ended = len(path) > 1 and above in eos
        if above in table and not ended and path[-1] < len(table[above]) and len(path) < end - len(seq):
            tokens[path] = table[above][path[-1]]
    texts = {path: [tokens[path[: depth + 1]] for depth in range(len(path))] for path in tokens}
    emitted, path = [base.next(seq)], ()
    while emitted[-1] not in eos:
        below = [(*path, rank) for rank in range(top_k) if tokens.get((*path, rank)) == emitted[-1]]
        if not below:
            break
        path = below[0]
        emitted.append(base.next(seq + texts[path]))
    for path in tokens:
        table[tokens[path]] = base.rank(seq + texts[path])[:top_k]
    return emitted, len(tokens) - 1


@pytest.mark.parametrize(("num_nodes", "top_k"), [(1, 1), (5, 2), (12, 3), (12, 20), (40, 8)])
@pytest.mark.parametrize("seed", range(3))
def test_token_recycling_takes_the_steps_of_the_published_algorithm(ranked, num_nodes, top_k, seed):
    rng = random.Random(seed)
    runner = ranked(seed, vocab=10, order=rng.choice([1, 2]))
    drafter, table = TokenRecycling(num_nodes, top_k), {}
    template = best_first(num_nodes, top_k)
    session, gained = Session(runner, drafter), 0
    for length in (1, 2, 9):  # the table is kept
        seq = [rng.randrange(10) for _ in range(length)]
        session.begin(seq)
        eos, end = frozenset(rng.sample(range(10), rng.choice([0, 1]))), length + 25
        while len(seq) < end and not (seq[length:] and seq[-1] in eos):
            wanted, num_fed = slow_step(runner, seq, table, template, min(top_k, 10), eos, end)
            emitted, cost = session.step(end, eos)
            assert emitted == wanted[: end - len(seq)]
            assert cost.fed_candidates == num_fed
            assert drafter._successors == table
            seq += emitted
            gained += cost.accepted
    assert gained


@pytest.mark.slow
def test_the_table_is_kept_between_texts_until_reset(ranked):
    drafter = TokenRecycling()
    session = Session(ranked(), drafter)
    first = len(session.run([1, 2], 40).steps)
    assert len(session.run([1, 2], 40).steps) < first
    drafter.reset()
    assert len(session.run([1, 2], 40).steps) == first


@pytest.mark.parametrize("num_nodes", [0, 1, 2, 7, 25])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_the_tree_has_the_most_probable_rank_paths(num_nodes, top_k):
    depth = 9 if top_k > 1 else num_nodes
    every = [path for length in range(1, depth + 1) for path in product(range(top_k), repeat=length)]
    every.sort(key=lambda path: (-prod(map(rank_probability, path)), path))
    template = best_first(num_nodes, top_k)
    assert sorted(template) == sorted(every[:num_nodes])
    assert max(map(len, template), default=0) < 9 or top_k == 1, "otherwise the enumeration may be incomplete"
