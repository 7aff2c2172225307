"""Retrieval drafter: drafts what followed the last tokens in a large text, found in its suffix array."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from drafters.checks import check_at_least
from drafters.protocol import Drafter, Limits
from drafters.registry import register
from drafters.training_free.suffix_array import SuffixArray
from drafters.tree import ROOT, DraftTree


@register("rest", "STORE", load=SuffixArray.open, argument="store", command="datastore")
@dataclass(eq=False)
class REST(Drafter):
    """Retrieval-based speculative decoding (REST, arXiv 2311.08252, section 3).

    The longest suffix of the text that occurs in the datastore is looked up. The tokens after its occurrences there, up
    to ``length`` each and within the same document, form a trie that counts each prefix. The draft tree consists of the
    ``num_draft`` most frequent prefixes; among equally frequent ones the shorter come first, then those of smaller
    token ids.

    Args:
        store: The datastore.
        num_draft: Largest number of nodes of the tree.
        longest: Number of tokens of the longest suffix to look up.
        shortest: Number of tokens of the shortest suffix to look up.
        num_hits: Largest number of occurrences to read, the first in the order of the suffix array.
        length: Largest number of tokens to read after an occurrence.
    """

    store: SuffixArray
    num_draft: int = 64
    longest: int = 16
    shortest: int = 2
    num_hits: int = 5000
    length: int = 10
    remembers = False

    def __post_init__(self) -> None:
        check_at_least(1, num_draft=self.num_draft, shortest=self.shortest, num_hits=self.num_hits, length=self.length)
        check_at_least(self.shortest, longest=self.longest)
        if (depth := self.longest + self.length) > self.store.depth:
            raise ValueError(
                f"the datastore is sorted by {self.store.depth} tokens, and longest + length is {depth}: "
                "look up less, or build it again with a greater --depth"
            )
        self._offsets = np.arange(depth)[:, None]

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        room, deepest = min(self.num_draft, limits.max_nodes), min(self.length, limits.max_depth)
        first, last, matched = self.store.longest_match(seq, self.longest, self.shortest)
        if not matched or room < 1 or deepest < 1:
            return DraftTree()
        last = min(last, first + self.num_hits)
        places = self.store.suffixes[first:last] + self._offsets[matched : matched + deepest]
        columns = self.store.tokens.take(places, mode="clip")  # (depth, hits); the last token of the text is a border
        return most_frequent(columns, room, self.store.border, limits.eos)


def most_frequent(columns: np.ndarray, max_nodes: int, border: int, eos: Iterable[int]) -> DraftTree:
    """The tree of the ``max_nodes`` most frequent prefixes of the columns (depth, hits) of an array of tokens.

    Among equally frequent prefixes the shorter come first, then those of smaller token ids. A prefix is a run of equal
    values in a row of the array. It is never more frequent than a shorter one that it extends, so the chosen prefixes
    form a tree. A column ends before a border, below which is another document, and after an end-of-sequence token; up
    to there the columns are in ascending order.
    """
    over = columns == border
    for token in eos:
        over[1:] |= columns[:-1] == token
    np.logical_or.accumulate(over, out=over)
    starting = np.ones(columns.shape, dtype=bool)
    np.not_equal(columns[:, 1:], columns[:, :-1], out=starting[:, 1:])
    np.logical_or.accumulate(starting, out=starting)
    starts = starting.ravel().nonzero()[0]
    counts = np.empty(len(starts), dtype=np.int64)
    np.subtract(starts[1:], starts[:-1], out=counts[:-1])
    counts[-1] = columns.size - starts[-1]
    counts[over.ravel()[starts]] = 0
    order = (-counts).argsort(kind="stable")[:max_nodes]
    chosen = starts[order[: np.count_nonzero(counts[order])]]
    width = columns.shape[1]
    above = starts[starts.searchsorted(chosen - width, "right") - 1].tolist()  # the run in the row above
    nodes = {start: node for node, start in enumerate(chosen.tolist())}
    parents = [nodes[run] if start >= width else ROOT for start, run in zip(nodes, above, strict=True)]
    return DraftTree(columns.ravel()[chosen].tolist(), parents)
