"""Retrieval drafting: what followed the text's last words in a large text, found in its suffix array."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from drafters.protocol import Drafter, Limits
from drafters.training_free.suffix_array import SuffixArray
from drafters.tree import ROOT, DraftTree

FEW = 32  # hits that Python counts before numpy's many calls have begun


class REST(Drafter):
    """Retrieval-based speculative decoding (REST, arXiv 2311.08252, section 3).

    The longest end of the text that stands in the datastore is looked up. What follows it there, up to ``length``
    tokens a hit and none of the next document, makes a trie that counts each prefix. The draft is the ``num_draft``
    most frequent prefixes: of equally frequent ones the shorter, then the one of smaller tokens.

    Args:
        store: The datastore.
        num_draft: Nodes of the tree at most.
        longest: Tokens of the longest end that is looked up.
        shortest: Tokens of the shortest.
        num_hits: Hits looked at, the first in the suffix array's order.
        length: Tokens of a continuation.
        official_cut: Drop prefixes, those of most distinct tokens first, until their distinct tokens add up to no more
            than ``num_draft``, as the paper's code does; it counts a token once for each prefix it is in.
    """

    history_only = True
    remembers = False

    def __init__(
        self,
        store: SuffixArray,
        num_draft: int = 64,
        longest: int = 16,
        shortest: int = 2,
        num_hits: int = 5000,
        length: int = 10,
        official_cut: bool = False,
    ) -> None:
        if min(num_draft, shortest, num_hits, length) < 1 or longest < shortest:
            raise ValueError(
                "num_draft, shortest, num_hits and length must be at least 1 and longest at least shortest, got "
                f"{num_draft}, {shortest}, {num_hits}, {length} and {longest}"
            )
        if longest + length > store.depth:
            raise ValueError(
                f"the datastore is sorted by {store.depth} tokens, and longest + length is {longest + length}: "
                "look up less, or build it again with a greater --depth"
            )
        self.store, self.num_draft, self.longest, self.shortest = store, num_draft, longest, shortest
        self.num_hits, self.length, self.official_cut = num_hits, length, official_cut
        self._offsets = np.arange(longest + length)[:, None]

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        room, deepest = min(self.num_draft, limits.max_nodes), min(self.length, limits.max_depth)
        first, last, matched = self.store.longest_match(seq, self.longest, self.shortest)
        if not matched or room < 1 or deepest < 1:
            return DraftTree()
        last = min(last, first + self.num_hits)
        if last - first <= FEW:
            paths = self.store.continuations(first, last, matched, deepest)
            tree = most_frequent([_until_eos(path, limits.eos) for path in paths], room)
        else:
            places = self.store.suffixes[first:last] + self._offsets[matched : matched + deepest]
            found = self.store.tokens.take(places, mode="clip")  # the text ends in a border
            tree = most_frequent_of_many(found, room, self.store.border, limits.eos)
        return officially_cut(tree, room) if self.official_cut else tree


def _until_eos(path: list[int], eos: frozenset[int]) -> list[int]:
    if eos and not eos.isdisjoint(path):
        return path[: 1 + next(index for index, token in enumerate(path) if token in eos)]
    return path


def most_frequent(paths: Sequence[Sequence[int]], most: int) -> DraftTree:
    """The ``most`` frequent prefixes of ascending paths; of equals the shorter, then those of smaller tokens."""
    tokens: list[int] = []
    parents: list[int] = []
    ranks: list[int] = []  # depth, less a great number for each further path through the node
    trail: list[int] = []  # nodes of the path before
    before: Sequence[int] = ()
    for path in paths:
        shared = 0
        for old, new in zip(before, path, strict=False):
            if old != new:
                break
            ranks[trail[shared]] -= 1 << 32
            shared += 1
        del trail[shared:]
        for depth in range(shared, len(path)):
            parents.append(trail[-1] if trail else ROOT)
            trail.append(len(tokens))
            tokens.append(path[depth])
            ranks.append(depth)
        before = path
    if len(tokens) <= most:
        return DraftTree(tokens, parents)
    chosen = sorted(range(len(tokens)), key=ranks.__getitem__)[:most]
    nodes = {old: new for new, old in enumerate(chosen)} | {ROOT: ROOT}
    return DraftTree([tokens[node] for node in chosen], [nodes[parents[node]] for node in chosen])


def most_frequent_of_many(found: np.ndarray, most: int, border: int, eos: Iterable[int]) -> DraftTree:
    """As `most_frequent`, for the columns of an array (depth, hits): slow to start, and fast.

    A prefix is a run in its row, and runs are numbered as they come: shorter prefixes first, then smaller tokens. A
    count never exceeds that of a shorter prefix, so what is taken is a tree.

    Args:
        found: Tokens, columns in ascending order down to their borders.
        most: Prefixes at most.
        border: What ends a column; the tokens behind it are of another document.
        eos: Tokens that end a column after themselves.
    """
    over = found == border
    for token in eos:
        over[1:] |= found[:-1] == token
    np.logical_or.accumulate(over, out=over)
    starting = np.ones(found.shape, dtype=bool)
    np.not_equal(found[:, 1:], found[:, :-1], out=starting[:, 1:])
    np.logical_or.accumulate(starting, out=starting)
    starts = starting.ravel().nonzero()[0]
    counts = np.empty(len(starts), dtype=np.int64)
    np.subtract(starts[1:], starts[:-1], out=counts[:-1])
    counts[-1] = found.size - starts[-1]
    counts[over.ravel()[starts]] = 0
    order = (-counts).argsort(kind="stable")[:most]
    chosen = starts[order[: np.count_nonzero(counts[order])]]
    width = found.shape[1]
    above = starts[starts.searchsorted(chosen - width, "right") - 1].tolist()  # the run one row up
    nodes = {start: node for node, start in enumerate(chosen.tolist())}
    parents = [nodes[run] if start >= width else ROOT for start, run in zip(nodes, above, strict=True)]
    return DraftTree(found.ravel()[chosen].tolist(), parents)


def officially_cut(tree: DraftTree, most: int) -> DraftTree:
    """Drop prefixes of most distinct tokens, of equals the longer, until all that are left add up to ``most``."""
    paths = [tree.path_tokens(node) for node in range(len(tree))]
    paths.sort(key=lambda path: (-len(set(path)), -len(path), path))
    total, kept = 0, []
    for path in reversed(paths):
        total += len(set(path))
        if total > most:
            break
        kept.append(path)
    return DraftTree.from_paths(kept)
