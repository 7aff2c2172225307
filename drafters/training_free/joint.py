"""The joint drafter: what training-free drafters know, weighed by how often it was right, in one best-first tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush

from drafters.protocol import Drafter, Limits, RequiredOutputs, StepResult
from drafters.training_free.corpus import CorpusTable
from drafters.training_free.followers import BITS, EXPERIENCES, FollowerTable, extended
from drafters.tree import DraftTree

TEXT, HISTORY, RUNNERS_UP, CORPUS = range(4)
_TOKEN = (1 << BITS) - 1
_UNASKED = 1  # stands where heap entries have a token, negated
_MOST_PAIRS = 1_000_000  # contexts of two tokens whose runners-up are remembered
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
        self.required_outputs, self.history_only = RequiredOutputs(top_k=runner_up), runner_up == 0
        self.reset()

    def reset(self) -> None:
        self._past = FollowerTable(self.order, self.growth)
        self._tops: tuple[dict[int, tuple[int, ...]], ...] = ({}, {})  # after one token, after two
        widths = range(self.order)
        # Of each kind of source and width: times asked and times it held the token, by the source's experience.
        self._right = [[[[2.0, 1.0] for _ in range(EXPERIENCES)] for _ in widths] for _ in range(4)]
        # Of each kind whose sources are ranked: how often each rank was right.
        ranks = [1 / (1 + rank) for rank in range(max(self.runner_up, _MOST))]
        self._ranks = {kind: [list(ranks) for _ in widths] for kind in (RUNNERS_UP, CORPUS)}
        self._text: list[int] = []

    def begin(self, prompt: Sequence[int]) -> None:
        if self.history:
            self._past.learn_text(self._text)
        self._here = FollowerTable(self.order, self.growth)
        self._tables = [list(self._lookups(num_keys)) for num_keys in range(self.order + 1)]
        self._text, self._keys = [], []
        self._fed: tuple[DraftTree, list[list[int]]] | None = None
        self._learn(prompt, weigh=False)

    def _lookups(self, num_keys: int) -> Iterator[tuple[int, Callable, list[list[float]], list[float]]]:
        """The sources in the order of asking: width, look-up by context, how often it was right, weights of ranks."""
        for width in reversed(range(num_keys)):
            if width < len(self._tops):
                yield width, self._tops[width].get, self._right[RUNNERS_UP][width], self._ranks[RUNNERS_UP][width]
            yield width, self._here.widths[width].get, self._right[TEXT][width], []
            yield width, self._past.widths[width].get, self._right[HISTORY][width], []
            if self.corpus is not None:
                yield width, partial(self._after, width), self._right[CORPUS][width], self._ranks[CORPUS][width]

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
        keys = self._keys
        for width, table, right, ranks in self._tables[len(keys)]:
            if source := table(keys[width]):
                counts = right[0 if ranks else source.experience]
                counts[0] += 1
                if token in (source if ranks else source.weights):
                    counts[1] += 1
                    if ranks:
                        ranks[source.index(token)] += 1
                    return

    def observe(self, step: StepResult) -> None:
        self._learn(step.emitted)  # first, so that sources are weighed by what they held before this step
        if self.runner_up and self._fed and step.tree is self._fed[0]:
            after_one, after_two = self._tops
            for keys, top in zip(self._fed[1], map(tuple, step.top), strict=True):
                after_one[keys[0]] = top
                if len(keys) > 1:
                    after_two[keys[1]] = top
            if len(after_two) > _MOST_PAIRS:
                after_two.clear()

    # ---- drafting

    def _after(self, width: int, key: int) -> tuple[int, ...]:
        """The tokens that follow a context in the corpus, the most frequent first."""
        known = self._in_corpus[width]
        if key not in known:
            context = [key >> BITS * place & _TOKEN for place in range(width, -1, -1)]
            known[key] = tuple(dict.fromkeys(gram[0] for gram in self.corpus.after(context)))[:_MOST]
        return known[key]

    def _shares(self, keys: Sequence[int]) -> Iterator[tuple[float, dict[int, float], float]]:
        """Ask one source after the other what follows the contexts ``keys``.

        Yields:
            The probability of a weight of one, the weights of the tokens that no source before held, and the
            probability left for later sources.
        """
        left = 1.0
        held: dict[int, float] = {}
        for width, table, right, ranks in self._tables[len(keys)]:
            source = table(keys[width])
            if not source:
                continue
            if ranks:
                asked, correct = right[0]
                weights = dict(zip(source, ranks))  # noqa: B905 - the keyword would double its time
                total = sum(weights.values())
            else:
                asked, correct = right[source.experience]
                weights, total = source.weights, source.total
            if held:
                weights = {token: weight for token, weight in weights.items() if token not in held}
                if not weights:
                    continue
                total = sum(weights.values())
            share = left * (correct / asked)
            left -= share
            yield share / total, weights, left
            held |= weights

    def following(self, keys: Sequence[int]) -> list[tuple[float, int]]:
        """Probable next tokens after the contexts ``keys``, the most probable first.

        Args:
            keys: Contexts, the shortest first, as `extended` makes them.

        Returns:
            (probability, token) pairs; the probabilities add up to one at most.
        """
        shares = self._shares(keys)
        found = [(unit * weight, token) for unit, weights, _ in shares for token, weight in weights.items()]
        return sorted(found, reverse=True)

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        self._learn(seq[len(self._text) :])
        least, room = self.min_probability, min(self.num_nodes, limits.max_nodes)
        tokens: list[int] = []
        parents: list[int] = []
        # Of the root and of each node: its contexts, depth, probability, and the sources not yet asked what follows.
        contexts, depths, probabilities, unasked = [self._keys], [0], [1.0], [self._shares(self._keys)]
        # What may come next, the most probable first: (-probability, place of the contexts, -token). What a context has
        # left for its next source waits among them, as no token of that source is more probable: so few are ever asked.
        heap: list[tuple[float, int, int]] = [(-1.0, 0, _UNASKED)] if limits.max_depth > 0 else []
        while heap and len(tokens) < room:
            negative, place, token = heappop(heap)
            if token != _UNASKED:
                token = -token
                tokens.append(token)
                parents.append(place - 1)
                contexts.append(extended(contexts[place], token, self.order))
                depths.append(depths[place] + 1)
                probabilities.append(-negative)
                place = len(tokens)
                unasked.append(self._shares(contexts[place]))
                if depths[place] >= limits.max_depth or token in limits.eos or place == room:
                    continue
            above = probabilities[place]
            for unit, weights, left in unasked[place]:  # one source
                for token, weight in weights.items():
                    probability = above * (unit * weight)
                    if probability >= least:
                        heappush(heap, (-probability, place, -token))
                if above * left >= least:
                    heappush(heap, (-above * left, place, _UNASKED))
                break
        tree = DraftTree(tokens, parents)
        self._fed = tree, contexts
        return tree
