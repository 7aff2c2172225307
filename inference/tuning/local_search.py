"""Search for the best skip set: exhaustive if there are few sets, otherwise iterated local search."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import combinations, cycle

SkipSet = frozenset[int]  # sublayers by number: the attention of layer i is i, its MLP is L + i
Layers = tuple[tuple[int, ...], tuple[int, ...]]


def as_layers(skips: SkipSet, num_layers: int) -> Layers:
    """Return the layers whose attention is skipped, and those whose MLP is skipped."""
    attention = tuple(sorted(sublayer for sublayer in skips if sublayer < num_layers))
    return attention, tuple(sorted(sublayer - num_layers for sublayer in skips if sublayer >= num_layers))


class _BudgetSpent(Exception):
    """As many sets have been scored as the search may score."""


def search(
    score: Callable[[SkipSet], float], num_sublayers: int, starts: Sequence[SkipSet], evaluations: int, seed: int = 0
) -> SkipSet:
    """Return the skip set with the highest score.

    If there are at most ``evaluations`` sets, all are scored. Otherwise the search starts from the best of ``starts``
    and adds or removes single sublayers in random order as long as that helps. Where no single change helps, it starts
    again from the best set so far with two random changes, then three, and so on. The same arguments give the same
    search.

    Args:
        score: Score of a set; higher is better.
        num_sublayers: Number of sublayers, 2L.
        starts: Sets to start from.
        evaluations: Maximum number of distinct sets to score.
        seed: Seed of the random changes.
    """
    rng = random.Random(seed)
    scores: dict[SkipSet, float] = {}

    def scored(skips: SkipSet) -> float:
        if skips not in scores:
            if len(scores) == evaluations:
                raise _BudgetSpent
            scores[skips] = score(skips)
        return scores[skips]

    def climb(skips: SkipSet) -> None:
        order, num_failures = rng.sample(range(num_sublayers), num_sublayers), 0
        while num_failures < num_sublayers:
            order.append(order.pop(0))
            changed = skips ^ {order[-1]}
            is_better = scored(changed) > scored(skips)
            skips, num_failures = (changed, 0) if is_better else (skips, num_failures + 1)

    with suppress(_BudgetSpent):
        if 2**num_sublayers <= evaluations:
            for size in range(num_sublayers + 1):
                for skips in combinations(range(num_sublayers), size):
                    scored(frozenset(skips))
            raise _BudgetSpent
        climb(max(starts, key=scored))
        for size in cycle(range(2, num_sublayers + 1)):
            climb(max(scores, key=scores.__getitem__) ^ frozenset(rng.sample(range(num_sublayers), size)))
    return max(scores, key=scores.__getitem__)
