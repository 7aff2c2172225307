"""N-gram drafters: what followed the same words earlier in this text follows them again."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from drafters.protocol import Drafter, Limits
from drafters.tree import DraftTree

Gram = tuple[int, ...]


class _NgramIndex(Drafter):
    """An index of the text's n-grams that grows token by token and is taken back token by token.

    It reads the text itself when asked to propose, so it owes nothing to what it is told of a step: inside an inner
    session parts of the text were never observed. A step costs what it adds to the text, however long that is.

    Args:
        shortest, longest: Tokens of the shortest and of the longest n-gram.
    """

    history_only = True
    remembers = False

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest

    def begin(self, prompt: Sequence[int]) -> None:
        self._text: list[int] = []
        self._clear()
        self._read(prompt)

    def rewind(self, length: int) -> None:
        while len(self._text) > length:
            for gram in reversed(self._last_grams()):
                self._remove(gram)
            self._text.pop()

    def _read(self, seq: Sequence[int]) -> None:
        for token in seq[len(self._text) :]:
            self._text.append(token)
            for gram in self._last_grams():
                self._add(gram)

    def _last_grams(self) -> list[Gram]:
        """The n-grams that end with the text's last token."""
        tail = tuple(self._text[-self._longest :])
        return [tail[start:] for start in range(len(tail) - self._shortest + 1)]

    @abstractmethod
    def _clear(self) -> None:
        """Forget every n-gram."""

    @abstractmethod
    def _add(self, gram: Gram) -> None:
        """The text now ends with this n-gram."""

    @abstractmethod
    def _remove(self, gram: Gram) -> None:
        """Undo the `_add` of this n-gram, the last to be added; the text still ends with it."""


class ANPD(_NgramIndex):
    """Adaptive n-gram parallel decoding (ANPD paper, Algorithms 1 and 2).

    Tables of order 2..N count which token followed each context of n - 1 tokens. Drafting asks the highest order
    that knows the context; among equally frequent tokens the one first seen last wins. Each context holds its best
    follower ready, so that asking is one look-up.

    Args:
        order: N, the longest n-gram.
        num_draft: K, tokens drafted a step.
        update: Whether emitted tokens enter the tables; off keeps those of the prompt.
    """

    def __init__(self, order: int = 5, num_draft: int = 7, update: bool = True) -> None:
        if order < 2 or num_draft < 1:
            raise ValueError(f"order must be at least 2 and num_draft at least 1, got {order} and {num_draft}")
        super().__init__(shortest=2, longest=order)
        self.order, self.num_draft, self.update = order, num_draft, update

    def _clear(self) -> None:
        self._seen: dict[Gram, tuple[int, int]] = {}  # n-gram -> its count, and where it first ended
        self._best: dict[Gram, tuple[int, int, int]] = {}  # context -> the greatest (count, first end, token)
        self._replaced: list[tuple[int, int, int] | None] = []  # the best before each count, to go back to

    def _add(self, gram: Gram) -> None:
        context = gram[:-1]
        count, first = self._seen.get(gram, (0, len(self._text)))
        self._seen[gram] = count + 1, first
        best, found = self._best.get(context), (count + 1, first, gram[-1])
        self._replaced.append(best)
        if best is None or found > best:
            self._best[context] = found

    def _remove(self, gram: Gram) -> None:
        context = gram[:-1]
        count, first = self._seen.pop(gram)
        if count > 1:
            self._seen[gram] = count - 1, first
        best = self._replaced.pop()
        if best is None:
            del self._best[context]
        else:
            self._best[context] = best

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        if self.update:
            self._read(seq)
        draft: list[int] = []
        context = tuple(seq[1 - self.order :])
        room = min(self.num_draft, limits.max_depth, limits.max_nodes)
        while len(draft) < room and (token := self._next(context)) is not None:
            draft.append(token)
            if token in limits.eos:
                break
            context = (*context, token)[1 - self.order :]
        return _chain(draft)

    def _next(self, context: Gram) -> int | None:
        for start in range(len(context)):
            if best := self._best.get(context[start:]):
                return best[2]
        return None


class PromptLookup(_NgramIndex):
    """Prompt lookup decoding: copy what followed the leftmost earlier match of the last tokens (Saxena 2023).

    Longer matches are tried first. The two known rules part where little text follows the match, and at its end.

    Args:
        max_ngram: Longest suffix looked for; shorter ones follow.
        num_draft: Tokens copied at most.
        partial: Copy what there is, up to an end-of-sequence token, as transformers does; off copies ``num_draft``
            tokens or else tries a shorter match, as the original code does.
    """

    def __init__(self, max_ngram: int = 3, num_draft: int = 10, partial: bool = True) -> None:
        if max_ngram < 1 or num_draft < 1:
            raise ValueError(f"max_ngram and num_draft must be at least 1, got {max_ngram} and {num_draft}")
        super().__init__(shortest=1, longest=max_ngram)
        self.max_ngram, self.num_draft, self.partial = max_ngram, num_draft, partial

    def _clear(self) -> None:
        self._first: dict[Gram, int] = {}  # n-gram -> where its leftmost occurrence ends

    def _add(self, gram: Gram) -> None:
        self._first.setdefault(gram, len(self._text))

    def _remove(self, gram: Gram) -> None:
        if self._first[gram] == len(self._text):
            del self._first[gram]

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        self._read(seq)
        room = min(self.num_draft, limits.max_depth, limits.max_nodes)
        start = self._match(seq)
        if start is None or room < 1:
            return DraftTree()
        draft = list(seq[start : start + room])
        for index, token in enumerate(draft):
            if token in limits.eos:
                return _chain(draft[: index + (not self.partial)])
        return _chain(draft)

    def _match(self, seq: Sequence[int]) -> int | None:
        """Where to copy from. Matches further right have less text behind them: the leftmost decides."""
        length = len(seq)
        tail = tuple(seq[-self.max_ngram :])
        for at in range(len(tail)):
            start = self._first[tail[at:]]
            width = len(tail) - at
            # The original asks for a full copy, and that no token of the suffix itself is its first.
            fits = start + self.num_draft <= length and start < length - width
            if start < length if self.partial else fits:
                return start
        return None


def _chain(tokens: Sequence[int]) -> DraftTree:
    return DraftTree(tokens, range(-1, len(tokens) - 1))
