"""Tables of the tokens that followed each context, weighted towards recent ones, for the joint drafter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

BITS = 20  # enough for a token id, so that a context of w tokens is one integer of w * BITS bits
EXPERIENCES = 36  # number of classes that `Followers.experience` distinguishes


def extended(keys: Sequence[int], token: int, order: int) -> list[int]:
    """Append a token to a text and return its new contexts.

    Args:
        keys: The contexts of 1 to ``order`` tokens at the end of the text, the shortest first.
        token: The next token.
        order: Number of tokens of the longest context.
    """
    longer = [token]
    for key in keys[: order - 1]:  # runs for every node, and a comprehension would take twice as long
        longer.append(key << BITS | token)
    return longer


class Followers:
    """Tokens that followed one context, each weighted more than the one before it by a constant factor.

    Its ``experience``, a number below `EXPERIENCES`, classifies it by how many different tokens it holds and how often
    the context has occurred.

    Args:
        token: The first token that followed the context.
    """

    __slots__ = ("count", "experience", "step", "total", "weights")

    def __init__(self, token: int) -> None:
        self.weights = {token: 1.0}
        self.total = self.step = 1.0
        self.count = 1
        self.experience = _experience(1, 1)

    def add(self, token: int, growth: float, max_tokens: int) -> None:
        """Count one more token that followed the context.

        The weight of each new token grows, which is cheaper than fading all earlier ones.

        Args:
            token: The token.
            growth: Factor by which it weighs more than the previous one.
            max_tokens: Number of different tokens to keep; beyond it the one of the smallest weight is dropped.
        """
        weights = self.weights
        self.step *= growth
        self.count += 1
        weights[token] = weights.get(token, 0.0) + self.step
        self.total += self.step
        if len(weights) > max_tokens:
            self.total -= weights.pop(min(weights, key=weights.__getitem__))
        if self.step > 1e100:  # rescale before the weights overflow
            for other in weights:
                weights[other] /= self.step
            self.total, self.step = self.total / self.step, 1.0
        self.experience = _experience(len(weights), self.count)


def _experience(num_tokens: int, count: int) -> int:
    return 6 * (num_tokens if num_tokens < 5 else 5) + (count if count < 5 else 5)


class FollowerTable:
    """The `Followers` of every context of 1 to ``order`` tokens.

    Args:
        order: Number of tokens of the longest context.
        growth: Factor by which each follower weighs more than the one before it.
        max_followers: Number of different followers kept per context.
        max_contexts: Number of contexts kept of each length; beyond it the oldest quarter is dropped.
    """

    def __init__(self, order: int, growth: float = 1.1, max_followers: int = 8, max_contexts: int = 1_000_000) -> None:
        self.growth, self.max_followers, self.max_contexts = growth, max_followers, max_contexts
        self.widths: list[dict[int, Followers]] = [{} for _ in range(order)]

    def learn(self, keys: Sequence[int], token: int) -> None:
        """Count a token that follows the contexts ``keys``, which are ordered from the shortest."""
        for width, key in enumerate(keys):
            contexts = self.widths[width]
            followers = contexts.get(key)
            if followers is not None:
                followers.add(token, self.growth, self.max_followers)
                continue
            contexts[key] = Followers(token)
            if len(contexts) > self.max_contexts:
                for old in list(islice(contexts, self.max_contexts // 4)):
                    del contexts[old]

    def learn_text(self, tokens: Sequence[int]) -> None:
        """Count every token of a text behind its contexts."""
        keys: list[int] = []
        for token in tokens:
            self.learn(keys, token)
            keys = extended(keys, token, len(self.widths))
