"""N-gram drafters: what followed the same words earlier in this text follows them again."""

from __future__ import annotations

from collections.abc import Sequence

from drafters.protocol import Drafter, Limits, StepResult
from drafters.tree import DraftTree


class ANPD(Drafter):
    """Adaptive n-gram parallel decoding (ANPD paper, Algorithms 1 and 2).

    Tables of order 2..N count which token followed each context of n - 1 tokens. Drafting asks the highest order
    that knows the context; among equally frequent tokens the one first seen last wins.

    Args:
        order: N, the longest n-gram.
        num_draft: K, tokens drafted a step.
        update: Whether emitted tokens enter the tables; off keeps those of the prompt.
    """

    history_only = True

    def __init__(self, order: int = 5, num_draft: int = 7, update: bool = True) -> None:
        if order < 2 or num_draft < 1:
            raise ValueError(f"order must be at least 2 and num_draft at least 1, got {order} and {num_draft}")
        self.order, self.num_draft, self.update = order, num_draft, update

    def begin(self, prompt: Sequence[int]) -> None:
        self._seen: list[int] = []
        self._counts: dict[tuple[int, ...], dict[int, int]] = {}
        self._learn(prompt)

    def _learn(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            for width in range(1, min(self.order - 1, len(self._seen)) + 1):
                context = tuple(self._seen[-width:])
                counts = self._counts.setdefault(context, {})
                counts[token] = counts.get(token, 0) + 1
            self._seen.append(token)

    def _next(self, history: list[int]) -> int | None:
        for width in range(min(self.order - 1, len(history)), 0, -1):
            counts = self._counts.get(tuple(history[-width:]))
            if counts:
                most = max(counts.values())
                return next(token for token in reversed(counts) if counts[token] == most)
        return None

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        history, draft = list(seq[1 - self.order :]), []
        while len(draft) < min(self.num_draft, limits.max_depth):
            token = self._next(history)
            if token is None:
                break
            draft.append(token)
            if token in limits.eos:
                break
            history = [*history, token][1 - self.order :]
        return DraftTree.from_paths([draft])

    def observe(self, step: StepResult) -> None:
        if self.update:
            self._learn(step.emitted)


class PromptLookup(Drafter):
    """Prompt lookup decoding: copy what followed the leftmost earlier match of the last tokens (Saxena 2023).

    Args:
        max_ngram: Longest suffix looked for; shorter ones follow.
        num_draft: Tokens copied at most.
    """

    history_only = True

    def __init__(self, max_ngram: int = 3, num_draft: int = 10) -> None:
        if max_ngram < 1 or num_draft < 1:
            raise ValueError(f"max_ngram and num_draft must be at least 1, got {max_ngram} and {num_draft}")
        self.max_ngram, self.num_draft = max_ngram, num_draft

    def begin(self, prompt: Sequence[int]) -> None:
        self._first: dict[tuple[int, ...], int] = {}  # n-gram -> where its leftmost occurrence ends
        self._seen: list[int] = []
        self._learn(prompt)

    def _learn(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._seen.append(token)
            for width in range(1, min(self.max_ngram, len(self._seen)) + 1):
                self._first.setdefault(tuple(self._seen[-width:]), len(self._seen))

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        for width in range(min(self.max_ngram, len(seq)), 0, -1):
            end = self._first.get(tuple(seq[-width:]), len(seq))
            if end < len(seq):
                return DraftTree.from_paths([seq[end : end + min(self.num_draft, limits.max_depth)]])
        return DraftTree()

    def observe(self, step: StepResult) -> None:
        self._learn(step.emitted)
