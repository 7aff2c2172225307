"""Which tokens followed each context, newer ones weighing more: the tables of the joint drafter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

BITS = 20  # a token id fits: a context of w tokens is one integer
EXPERIENCES = 36


def extended(keys: Sequence[int], token: int, order: int) -> list[int]:
    """The contexts of 1 to ``order`` tokens that end in ``token``, from those that ended before it."""
    longer = [token]
    for key in keys[: order - 1]:  # twice as fast as a comprehension: this runs for every node
        longer.append(key << BITS | token)
    return longer


class Followers:
    """Tokens that followed one context; each new one weighs more than the last by a constant factor.

    Its ``experience`` tells few tokens from many, and seen seldom from seen often: a number below `EXPERIENCES`.

    Args:
        token: The first.
    """

    __slots__ = ("experience", "seen", "step", "total", "weights")

    def __init__(self, token: int) -> None:
        self.weights = {token: 1.0}
        self.total = self.step = 1.0
        self.seen = 1
        self.experience = _experience(1, 1)

    def add(self, token: int, growth: float, most: int) -> None:
        """Count a token; of more than ``most`` the lightest is forgotten.

        Raising what comes fades what was, without touching it.
        """
        weights = self.weights
        self.step *= growth
        self.seen += 1
        weights[token] = weights.get(token, 0.0) + self.step
        self.total += self.step
        if len(weights) > most:
            self.total -= weights.pop(min(weights, key=weights.get))
        if self.step > 1e100:
            for other in weights:
                weights[other] /= self.step
            self.total, self.step = self.total / self.step, 1.0
        self.experience = _experience(len(weights), self.seen)


def _experience(num_tokens: int, seen: int) -> int:
    return 6 * (num_tokens if num_tokens < 5 else 5) + (seen if seen < 5 else 5)


class FollowerTable:
    """`Followers` of every context of 1 to ``order`` tokens.

    Args:
        order: Longest context.
        growth: How much more a follower weighs than the one before it.
        most: Followers kept for a context.
        most_contexts: Contexts kept of each width; beyond them the oldest quarter is forgotten.
    """

    def __init__(self, order: int, growth: float = 1.1, most: int = 8, most_contexts: int = 1_000_000) -> None:
        self.growth, self.most, self.most_contexts = growth, most, most_contexts
        self.widths: list[dict[int, Followers]] = [{} for _ in range(order)]

    def learn(self, keys: Sequence[int], token: int) -> None:
        """Count ``token`` behind the contexts ``keys``, the shortest first."""
        for width, key in enumerate(keys):
            contexts = self.widths[width]
            found = contexts.get(key)
            if found is not None:
                found.add(token, self.growth, self.most)
                continue
            contexts[key] = Followers(token)
            if len(contexts) > self.most_contexts:
                for old in list(islice(contexts, self.most_contexts // 4)):
                    del contexts[old]

    def learn_text(self, tokens: Sequence[int]) -> None:
        """Count a whole text."""
        keys: list[int] = []
        for token in tokens:
            self.learn(keys, token)
            keys = extended(keys, token, len(self.widths))
