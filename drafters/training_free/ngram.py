"""N-gram drafters, which draft what followed the last tokens earlier in the same text, and the pool of n-grams."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from itertools import takewhile

from drafters.checks import check_at_least
from drafters.protocol import Drafter, Limits, StepResult
from drafters.registry import register
from drafters.tree import DraftTree

Gram = tuple[int, ...]


class NgramPool:
    """The n-grams that followed each key token, in the order of their last insertion.

    Lookahead decoding, Self-Draft and Ouroboros keep theirs in one. Beyond ``max_per_key`` n-grams of a key the oldest
    is dropped; 0 keeps all.
    """

    def __init__(self, max_per_key: int = 0) -> None:
        self.max_per_key = max_per_key
        self._grams: dict[int, dict[Gram, None]] = {}

    def insert(self, key: int, gram: Sequence[int]) -> None:
        """Add an n-gram as the newest of its key; one that is there already is moved."""
        grams = self._grams.setdefault(key, {})
        new = tuple(gram)
        grams.pop(new, None)
        grams[new] = None
        if self.max_per_key and len(grams) > self.max_per_key:
            del grams[next(iter(grams))]

    def newest(self, key: int, count: int | None = None) -> list[Gram]:
        """Return the newest ``count`` n-grams of a key, or all, from the oldest to the newest."""
        grams = list(self._grams.get(key, ()))
        return grams if count is None else grams[max(0, len(grams) - count) :]

    def replace_newest(self, key: int, grams: Iterable[Sequence[int]]) -> None:
        """Replace the newest n-grams of a key by as many others."""
        grams = list(grams)
        for old in self.newest(key, len(grams)):
            del self._grams[key][old]
        for gram in grams:
            self.insert(key, gram)

    def keep_newest(self, count: int) -> None:
        """Drop all but the newest ``count`` n-grams of every key."""
        for key in self._grams:
            self._grams[key] = dict.fromkeys(self.newest(key, count))

    def clear(self) -> None:
        """Drop all n-grams."""
        self._grams.clear()


class _NgramIndex(Drafter):
    """An index of the n-grams of a text that can be extended and rewound token by token.

    It is updated from the text in `propose`, because inside a draft session parts of the text are never observed. A
    step costs in proportion to the tokens it adds, not to the length of the text. N-grams have ``shortest`` to
    ``longest`` tokens.
    """

    remembers = False

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest

    def begin(self, prompt: Sequence[int]) -> None:
        self._text: list[int] = []
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
        """Return the n-grams at the end of the text."""
        tail = tuple(self._text[-self._longest :])
        return [tail[start:] for start in range(len(tail) - self._shortest + 1)]

    @abstractmethod
    def _add(self, gram: Gram) -> None:
        """Add an n-gram, with which the text now ends."""

    @abstractmethod
    def _remove(self, gram: Gram) -> None:
        """Undo the most recent `_add`, of this n-gram; the text still ends with it."""


@register("anpd")
class ANPD(_NgramIndex):
    """Adaptive n-gram parallel decoding (ANPD, arXiv 2404.08698, Algorithms 1 and 2).

    Tables of order 2 to N count which token followed each context of n - 1 tokens. Each drafted token comes from the
    highest order that contains the context. Among equally frequent tokens, the one whose first occurrence is latest is
    drafted. The best follower of each context is stored, so that a look-up takes constant time. Unlike in Algorithm 1,
    a draft ends where no table has the context, and the first step drafts behind the prompt.

    Args:
        order: N, number of tokens of the longest n-gram.
        num_draft: K, largest number of tokens drafted per step.
        update: Whether emitted tokens are added to the tables. If false, only the n-grams of the prompt are used.
        multi_level: Whether all orders have tables. If false, only order N has one, as in the paper's Figure 10.
    """

    def __init__(self, order: int = 5, num_draft: int = 7, update: bool = True, multi_level: bool = True) -> None:
        check_at_least(2, order=order)
        check_at_least(1, num_draft=num_draft)
        super().__init__(shortest=2 if multi_level else order, longest=order)
        self.order, self.num_draft, self.update = order, num_draft, update

    def begin(self, prompt: Sequence[int]) -> None:
        self._counts: dict[Gram, tuple[int, int]] = {}  # n-gram -> its count and the end of its first occurrence
        self._best: dict[Gram, tuple[int, int, int]] = {}  # context -> the greatest (count, first end, token)
        self._replaced: list[tuple[int, int, int] | None] = []  # the best before each `_add`, for `_remove`
        super().begin(prompt)
        self._length = len(prompt)  # of the text, as far as prompts and steps have shown it

    def observe(self, step: StepResult) -> None:
        self._length += len(step.emitted)

    def rewind(self, length: int) -> None:
        super().rewind(length)
        self._length = min(self._length, length)

    def _add(self, gram: Gram) -> None:
        context = gram[:-1]
        count, first = self._counts.get(gram, (0, len(self._text)))
        self._counts[gram] = count + 1, first
        best, follower = self._best.get(context), (count + 1, first, gram[-1])
        self._replaced.append(best)
        if best is None or follower > best:
            self._best[context] = follower

    def _remove(self, gram: Gram) -> None:
        count, first = self._counts.pop(gram)
        if count > 1:
            self._counts[gram] = count - 1, first
        if best := self._replaced.pop():
            self._best[gram[:-1]] = best
        else:
            del self._best[gram[:-1]]

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        if self.update or len(seq) > self._length:  # tokens that no step emitted: the prompt of a resumed text
            self._read(seq)
            self._length = len(seq)
        draft: list[int] = []
        context = tuple(seq[1 - self.order :])
        room = min(self.num_draft, limits.max_depth, limits.max_nodes)
        while len(draft) < room and (token := self._next(context)) is not None:
            draft.append(token)
            if token in limits.eos:
                break
            context = (*context, token)[1 - self.order :]
        return DraftTree.chain(draft)

    def _next(self, context: Gram) -> int | None:
        for start in range(len(context)):
            if best := self._best.get(context[start:]):
                return best[2]
        return None


@register("prompt_lookup")
class PromptLookup(_NgramIndex):
    """Prompt lookup decoding (Saxena 2023): copy what followed the leftmost earlier match of the last tokens.

    Longer matches are tried first. What is there of a match is copied, up to an end-of-sequence token, as transformers
    does it.

    Args:
        max_ngram: Number of tokens of the longest suffix to match; shorter ones are tried next.
        num_draft: Largest number of tokens to copy.
    """

    def __init__(self, max_ngram: int = 3, num_draft: int = 10) -> None:
        check_at_least(1, max_ngram=max_ngram, num_draft=num_draft)
        super().__init__(shortest=1, longest=max_ngram)
        self.max_ngram, self.num_draft = max_ngram, num_draft

    def begin(self, prompt: Sequence[int]) -> None:
        self._first: dict[Gram, int] = {}  # n-gram -> the end of its leftmost occurrence
        super().begin(prompt)

    def _add(self, gram: Gram) -> None:
        self._first.setdefault(gram, len(self._text))

    def _remove(self, gram: Gram) -> None:
        if self._first[gram] == len(self._text):
            del self._first[gram]

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        self._read(seq)
        room = min(self.num_draft, limits.max_depth, limits.max_nodes)
        tail = tuple(seq[-self.max_ngram :])
        ends = (self._first[tail[place:]] for place in range(len(tail)))
        # The leftmost match decides, because it has the most text after it.
        start = next((end for end in ends if end < len(seq)), None)
        if start is None or room < 1:
            return DraftTree()
        return DraftTree.chain([*takewhile(lambda token: token not in limits.eos, seq[start : start + room])])
