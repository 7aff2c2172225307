"""The joint drafter: what training-free drafters know, weighed by how often it was right, in one best-first tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from drafters.protocol import Drafter, Limits, Needs, StepResult
from drafters.training_free.corpus import CorpusTable
from drafters.training_free.followers import BITS, Followers, FollowerTable, extended
from drafters.tree import ROOT, DraftTree

TEXT, HISTORY, RUNNERS_UP, CORPUS = range(4)
_BUCKETS = 64
_TOKEN = (1 << BITS) - 1
_MOST = 8  # followers of one context that a corpus is asked for


class Joint(Drafter):
    """Context n-grams, history across texts, and the base's runner-up tokens in one best-first tree. Our own.

    For a context of the last ``order`` tokens and its shorter ends there are up to four sources: what followed it in
    this text, what followed it in earlier texts, what follows it most often in a corpus, and what the base held most
    probable after it when it was last fed, accepted or not. They are asked from the longest context down, as in PPM:
    each is believed as often as it has held the next token so far (counted apart by source, width and how much it has
    seen), what is left goes to the next. The tree takes the most probable nodes first, and stops at the budget or
    where a node is too improbable to pay.

    Args:
        num_nodes: Nodes of the tree at most.
        min_probability: A node less probable than this is not fed.
        order: Tokens of the longest context.
        history: Whether texts decoded before are remembered.
        runner_up: How many of the base's most probable tokens are remembered after each fed token; 0 makes the drafter
            depend on tokens alone.
        fade: What a follower weighs against the one seen next.
        corpus: N-grams of a fixed text, if there is one.
    """

    def __init__(
        self,
        num_nodes: int = 16,
        min_probability: float = 0.02,
        order: int = 3,
        history: bool = True,
        runner_up: int = 4,
        fade: float = 0.9,
        corpus: CorpusTable | None = None,
    ) -> None:
        if num_nodes < 1 or order < 2 or runner_up < 0 or not 0 < min_probability < 1 or not 0 < fade <= 1:
            raise ValueError(
                "need num_nodes >= 1, order >= 2, runner_up >= 0, 0 < min_probability < 1 and 0 < fade <= 1, not "
                f"{num_nodes}, {order}, {runner_up}, {min_probability} and {fade}"
            )
        self.num_nodes, self.min_probability, self.order = num_nodes, min_probability, order
        self.history, self.runner_up, self.growth = history, runner_up, 1 / fade
        self.corpus = corpus
        self._in_corpus: list[dict[int, tuple[int, ...]]] = [{} for _ in range(order)]  # what was asked for already
        self.needs, self.history_only = Needs(top_k=runner_up), runner_up == 0
        self.reset()

    def reset(self) -> None:
        self._past = FollowerTable(self.order, self.growth)
        self._tops: tuple[dict[int, tuple[int, ...]], ...] = ({}, {})  # after one token, after two
        ranks = [1 / (1 + rank) for rank in range(max(self.runner_up, _MOST))]
        self._ranks = {kind: [list(ranks) for _ in range(self.order)] for kind in (RUNNERS_UP, CORPUS)}
        self._right: dict[int, list[float]] = {}  # bucket -> times asked, times it held the token
        self._text: list[int] = []

    def begin(self, prompt: Sequence[int]) -> None:
        if self.history:
            self._past.learn_text(self._text)
        self._here = FollowerTable(self.order, self.growth)
        self._text, self._keys = [], []
        self._fed: tuple[DraftTree, list[list[int]]] | None = None
        self._learn(prompt, weigh=False)

    def rewind(self, length: int) -> None:
        """The n-grams of what was refused stay: they were this base's own guess."""
        self._text = self._text[:length]
        self._keys = []
        for token in self._text[-self.order :]:
            self._keys = extended(self._keys, token, self.order)

    # ---- learning

    def _learn(self, tokens: Sequence[int], weigh: bool = True) -> None:
        for token in tokens:
            if weigh:
                self._weigh(token)
            self._here.learn(self._keys, token)
            self._keys = extended(self._keys, token, self.order)
            self._text.append(token)

    def _weigh(self, token: int) -> None:
        """Count which sources held the token that came: those asked before the first that did were wrong."""
        for bucket, source in self._sources(self._keys):
            asked = self._right.setdefault(bucket, [2.0, 1.0])
            asked[0] += 1
            if token in (source.weights if type(source) is Followers else source):
                asked[1] += 1
                if type(source) is tuple:
                    kind, width = bucket // _BUCKETS % 4, bucket // _BUCKETS // 4
                    self._ranks[kind][width][source.index(token)] += 1
                return

    def observe(self, step: StepResult) -> None:
        if self.runner_up and self._fed and step.tree is self._fed[0]:
            for keys, top in zip(self._fed[1], step.top, strict=True):
                top = tuple(top)
                for tops, key in zip(self._tops, keys, strict=False):
                    tops[key] = top

    # ---- drafting

    def _sources(self, keys: Sequence[int]) -> Iterator[tuple[int, Followers | tuple[int, ...]]]:
        """What is known after the contexts ``keys``, the longest first, each with the bucket it is weighed in."""
        for width in range(len(keys) - 1, -1, -1):
            key, base = keys[width], 4 * _BUCKETS * width
            if width < len(self._tops) and (top := self._tops[width].get(key)):
                yield base + RUNNERS_UP * _BUCKETS, top
            for kind, table in ((TEXT, self._here), (HISTORY, self._past)):
                if found := table.widths[width].get(key):
                    yield base + kind * _BUCKETS + 6 * min(len(found.weights), 5) + min(found.seen, 5), found
            if self.corpus is not None and (found := self._after(width, key)):
                yield base + CORPUS * _BUCKETS, found

    def _after(self, width: int, key: int) -> tuple[int, ...]:
        """The tokens that follow a context in the corpus, the most frequent first."""
        known = self._in_corpus[width]
        if key not in known:
            context = [key >> BITS * place & _TOKEN for place in range(width, -1, -1)]
            known[key] = tuple(dict.fromkeys(gram[0] for gram in self.corpus.after(context)))[:_MOST]
        return known[key]

    def following(self, keys: Sequence[int], enough: float = 0.0) -> list[tuple[float, int]]:
        """Probable next tokens after the contexts ``keys``, the most probable first.

        Args:
            keys: Contexts, the shortest first, as `extended` makes them.
            enough: Sources are no longer asked once what is left for them is less.

        Returns:
            (probability, token) pairs; the probabilities add up to one at most.
        """
        left = 1.0
        found: list[tuple[float, int]] = []
        held: set[int] = set()
        for bucket, source in self._sources(keys):
            asked = self._right.get(bucket)
            share = left * (asked[1] / asked[0] if asked else 0.5)
            if type(source) is Followers:
                weights, total = source.weights.items(), source.total
            else:
                kind, width = bucket // _BUCKETS % 4, bucket // _BUCKETS // 4
                weights = list(zip(source, self._ranks[kind][width], strict=False))
                total = sum(weight for _, weight in weights)
            if held:
                weights = [(token, weight) for token, weight in weights if token not in held]
                total = sum(weight for _, weight in weights)
                if not weights:
                    continue
            scale = share / total
            for token, weight in weights:
                found.append((scale * weight, token))
                held.add(token)
            left -= share
            if left < enough:
                break
        found.sort(reverse=True)
        return found

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        self._learn(seq[len(self._text) :])
        least, room = self.min_probability, min(self.num_nodes, limits.max_nodes)
        tokens: list[int] = []
        parents: list[int] = []
        contexts = [self._keys]
        # (-probability, tie-break, parent, depth, its probability, what may follow it, which of them)
        heap: list[tuple] = []
        if limits.max_depth > 0 and (found := self.following(self._keys, least)):
            heap.append((-found[0][0], 0, ROOT, 0, 1.0, found, 0))
        while heap and len(tokens) < room and heap[0][0] <= -least:
            negative, order, parent, depth, above, siblings, rank = heappop(heap)
            node, token = len(tokens), siblings[rank][1]
            tokens.append(token)
            parents.append(parent)
            contexts.append(extended(contexts[1 + parent], token, self.order))
            if rank + 1 < len(siblings):
                heappush(heap, (-above * siblings[rank + 1][0], order, parent, depth, above, siblings, rank + 1))
            if depth + 1 < limits.max_depth and token not in limits.eos:
                found = self.following(contexts[-1], -least / negative)
                if found:
                    heappush(heap, (negative * found[0][0], 1 + node, node, depth + 1, -negative, found, 0))
        tree = DraftTree(tokens, parents)
        self._fed = tree, contexts
        return tree
