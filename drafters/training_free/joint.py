"""The joint drafter: combines several training-free sources, weighted by how often each was right, in one tree."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np

from drafters.checks import check_at_least
from drafters.protocol import Drafter, Limits, RequiredOutputs, StepResult
from drafters.registry import register
from drafters.training_free.corpus import CorpusTable
from drafters.tree import DraftTree
from drafters.trees.search import SearchLimits, best_first

BITS = 20  # enough for a token id, so that a context of w tokens is one integer of w * BITS bits
TOKEN_MASK = (1 << BITS) - 1
EXPERIENCES = 36  # number of classes that `FollowerWeights.experience` distinguishes
TEXT, HISTORY, RUNNERS_UP, CORPUS = range(4)  # kinds of sources
MAX_PAIRS = 1_000_000  # contexts of two tokens whose runners-up are remembered, or of one length in the corpus
MAX_CORPUS_FOLLOWERS = 8  # number of followers of one context that are read from the corpus


def extended(keys: Sequence[int], token: int, order: int) -> list[int]:
    """The contexts of 1 to ``order`` tokens at the end of a text, the shortest first, from those before a token."""
    longer = [token]
    for key in keys[: order - 1]:  # runs for every node, and a comprehension would take twice as long
        longer.append(key << BITS | token)
    return longer


class FollowerWeights:
    """Tokens that followed one context, each weighted more than the one before it by a constant factor.

    Its ``experience``, a number below `EXPERIENCES`, classifies it by how many different tokens it holds and how often
    the context has occurred.
    """

    __slots__ = ("count", "experience", "step", "total", "weights")

    def __init__(self, token: int) -> None:
        self.weights = {token: 1.0}
        self.total = self.step = 1.0
        self.count = 1
        self.experience = _experience(1, 1)

    def add(self, token: int, growth: float, max_tokens: int) -> None:
        """Count one more token, which weighs ``growth`` times the one before: cheaper than fading all earlier ones.

        Beyond ``max_tokens`` different ones, that of the smallest weight is dropped.
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
    """The `FollowerWeights` of every context of 1 to ``order`` tokens, up to ``max_followers`` each.

    Beyond ``max_contexts`` of one length the oldest quarter is dropped.
    """

    def __init__(self, order: int, growth: float = 1.1, max_followers: int = 8, max_contexts: int = 1_000_000) -> None:
        self.growth, self.max_followers, self.max_contexts = growth, max_followers, max_contexts
        self.widths: list[dict[int, FollowerWeights]] = [{} for _ in range(order)]

    def learn(self, keys: Sequence[int], token: int) -> None:
        """Count a token that follows the contexts ``keys``, which are ordered from the shortest."""
        for contexts, key in zip(self.widths, keys, strict=False):
            if (followers := contexts.get(key)) is not None:
                followers.add(token, self.growth, self.max_followers)
                continue
            contexts[key] = FollowerWeights(token)
            if len(contexts) > self.max_contexts:
                for old in list(islice(contexts, self.max_contexts // 4)):
                    del contexts[old]

    def learn_text(self, tokens: Sequence[int]) -> None:
        """Count every token of a text behind its contexts."""
        keys: list[int] = []
        for token in tokens:
            self.learn(keys, token)
            keys = extended(keys, token, len(self.widths))


@register("joint", "CORPUS", is_optional=True, load=CorpusTable.load, argument="corpus", command="corpus")
@dataclass(eq=False)
class Joint(Drafter):
    """Drafts the most probable continuations by n-grams, earlier texts and the base's runner-up tokens. Our own method.

    For the context of the last ``order`` tokens and each of its suffixes there are up to four sources: the tokens that
    followed it in this text, those that followed it in earlier texts, those that follow it most often in a corpus, and
    those that the base found most probable when the context was last fed, whether accepted or not. As in prediction by
    partial matching (PPM), the sources are read from the longest context to the shortest. Each gets a share of the
    remaining probability equal to the fraction of times it has held the next token so far, counted separately by kind
    of source, length of context and experience; the rest goes to the next source. The tree takes the most probable
    nodes first until it has ``num_nodes`` nodes or no node reaches ``min_probability``.

    Args:
        num_nodes: Largest number of nodes of the tree.
        min_probability: A node whose estimated probability is below this is not fed.
        order: Number of tokens of the longest context.
        history: Whether texts decoded earlier are remembered.
        runner_up: Number of the base's most probable tokens remembered after each fed token. With 0 the drafter depends
            on tokens only.
        fade: Weight of a follower relative to the next one of the same context; 1 weights all equally.
        corpus: N-grams of a fixed text, if any.
    """

    num_nodes: int = 16
    min_probability: float = 0.02
    order: int = 3
    history: bool = True
    runner_up: int = 4
    fade: float = 0.9
    corpus: CorpusTable | None = None

    def __post_init__(self) -> None:
        check_at_least(1, num_nodes=self.num_nodes)
        check_at_least(2, order=self.order)
        check_at_least(0, runner_up=self.runner_up)
        if not 0 < self.min_probability < 1 or not 0 < self.fade <= 1:
            wrong = f"{self.min_probability} and {self.fade}"
            raise ValueError(f"need 0 < min_probability < 1 and 0 < fade <= 1, not {wrong}")
        self._corpus_followers: list[dict[int, tuple[int, ...]]] = [{} for _ in range(self.order)]  # by context
        self.required_outputs = RequiredOutputs(top_k=self.runner_up)
        self.reset()

    def reset(self) -> None:
        self._past = FollowerTable(self.order, 1 / self.fade)
        self._runners_up: tuple[dict[int, tuple[int, ...]], ...] = ({}, {})  # after one token, after two
        # By kind of source, length of context and experience: [times read, times it held the next token].
        self._hits = np.tile([2.0, 1.0], (4, self.order, EXPERIENCES, 1)).tolist()
        # For kinds whose sources are ranked lists, by length of context: how often each rank was right.
        ranks = [1 / (1 + rank) for rank in range(max(self.runner_up, MAX_CORPUS_FOLLOWERS))]
        self._ranks = {kind: [list(ranks) for _ in range(self.order)] for kind in (RUNNERS_UP, CORPUS)}
        self._text: list[int] = []

    def begin(self, prompt: Sequence[int]) -> None:
        if self.history:
            self._past.learn_text(self._text)
        self._here = FollowerTable(self.order, 1 / self.fade)
        self._tables = [list(self._lookups(num_keys)) for num_keys in range(self.order + 1)]
        self._text = []
        self._keys: list[int] = []  # the contexts at the end of the text, the shortest first
        self._fed: tuple[DraftTree, Sequence[Sequence[int]]] | None = None
        self._learn(prompt, scores_sources=False)

    def _lookups(self, num_keys: int) -> Iterator[tuple[int, Callable, list[list[float]], list[float]]]:
        """Yield the sources in reading order: context length, look-up function, hit counts, weights of the ranks."""
        for width in reversed(range(num_keys)):
            if width < len(self._runners_up):
                yield width, self._runners_up[width].get, self._hits[RUNNERS_UP][width], self._ranks[RUNNERS_UP][width]
            yield width, self._here.widths[width].get, self._hits[TEXT][width], []
            yield width, self._past.widths[width].get, self._hits[HISTORY][width], []
            if self.corpus is not None:
                yield width, partial(self._after, width), self._hits[CORPUS][width], self._ranks[CORPUS][width]

    def rewind(self, length: int) -> None:
        """Forget the rejected tokens; their n-grams stay, because the base has guessed them."""
        self._text = self._text[:length]
        self._keys = []
        for token in self._text[-self.order :]:
            self._keys = extended(self._keys, token, self.order)

    # ---- learning

    def _learn(self, tokens: Sequence[int], scores_sources: bool = True) -> None:
        for token in tokens:
            if scores_sources:
                self._score_sources(token)
            self._here.learn(self._keys, token)
            self._keys = extended(self._keys, token, self.order)
            self._text.append(token)

    def _score_sources(self, token: int) -> None:
        """Count which sources held the next token: the first that did was right, and those read before it wrong."""
        keys = self._keys
        for width, table, hits, ranks in self._tables[len(keys)]:
            if source := table(keys[width]):
                counts = hits[0 if ranks else source.experience]
                counts[0] += 1
                if token in (source if ranks else source.weights):
                    counts[1] += 1
                    if ranks:
                        ranks[source.index(token)] += 1
                    return

    def observe(self, step: StepResult) -> None:
        # First, so that the sources are scored by what they held before this step.
        self._learn(step.emitted)
        if self.runner_up and self._fed and step.tree == self._fed[0].first(len(step.tree)):
            after_one, after_two = self._runners_up
            for keys, top in zip(self._fed[1], map(tuple, step.top_tokens), strict=False):  # the last may be left out
                after_one[keys[0]] = top
                if len(keys) > 1:
                    after_two[keys[1]] = top
            if len(after_two) > MAX_PAIRS:
                after_two.clear()

    # ---- drafting

    def _after(self, width: int, key: int) -> tuple[int, ...]:
        """Return the tokens that follow a context in the corpus, the most frequent first."""
        assert self.corpus is not None
        followers = self._corpus_followers[width]
        if key not in followers:
            context = [key >> BITS * place & TOKEN_MASK for place in range(width, -1, -1)]
            if len(followers) >= MAX_PAIRS:
                followers.clear()
            distinct = dict.fromkeys(gram[0] for gram in self.corpus.after(context))
            followers[key] = tuple(distinct)[:MAX_CORPUS_FOLLOWERS]
        return followers[key]

    def following(self, keys: Sequence[int], min_probability: float = 0.0) -> list[tuple[float, int]]:
        """Return (probability, token) pairs of the tokens that may follow contexts, the most probable first.

        The probabilities add up to at most one. They are distributed over the sources of the contexts, one by one; of
        each only the tokens count that no earlier source holds. Sources that hold no token of ``min_probability`` need
        not be read.
        """
        remaining = 1.0
        pairs: list[tuple[float, int]] = []
        earlier: set[int] = set()
        for width, table, hits, ranks in self._tables[len(keys)]:
            source = table(keys[width])
            if not source:
                continue
            if ranks:
                num_reads, num_hits = hits[0]
                weights = dict(zip(source, ranks))  # noqa: B905 - strict= would take twice as long
                total = sum(weights.values())
            else:
                num_reads, num_hits = hits[source.experience]
                weights, total = source.weights, source.total
            if earlier:
                weights = {token: weight for token, weight in weights.items() if token not in earlier}
                if not weights:
                    continue
                total = sum(weights.values())
            share = remaining * (num_hits / num_reads)
            remaining -= share
            unit = share / total
            pairs += [(unit * weight, token) for token, weight in weights.items()]
            earlier.update(weights)
            if remaining < min_probability:
                break
        return sorted(pairs, reverse=True)

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        contexts = [self.contexts_after(seq)]  # of the root and of each node
        tree = best_first(
            lambda node, probability: self.following(contexts[node + 1], self.min_probability / probability),
            lambda parent, token: contexts.append(extended(contexts[parent + 1], token, self.order)),
            SearchLimits(min(self.num_nodes, limits.max_nodes), limits.max_depth, limits.eos, self.min_probability),
        )
        self.expect(tree, contexts)
        return tree

    # ---- also for a drafter that builds the tree itself

    def contexts_after(self, seq: Sequence[int]) -> list[int]:
        """Learn the tokens of a text that were not observed, and return the contexts at its end."""
        self._learn(seq[len(self._text) :])
        return self._keys

    def expect(self, tree: DraftTree, contexts: Sequence[Sequence[int]]) -> None:
        """Tell which tree will be fed, with the contexts of its root and nodes, so that `observe` can learn from it."""
        self._fed = tree, contexts
