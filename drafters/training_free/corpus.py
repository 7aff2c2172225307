"""The corpus cache: the most frequent n-grams of a large text, looked up by the tokens before them."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from data.files import atomic_write, reading
from drafters.checks import check_at_least
from drafters.protocol import Drafter, Limits
from drafters.registry import register
from drafters.tree import DraftTree

FORMAT = "drafters-corpus-1"


@dataclass(frozen=True)
class CorpusTable:
    """Frequent n-grams by the context before them (Self-Draft paper, "Draft Cache Initialization").

    The contexts form a trie that is read backwards from the last token. Node 0 is the empty context. Node i > 0 has the
    code ``keys[i - 1]`` = parent << 32 | token, and its n-grams are ``grams[offsets[i - 1] : offsets[i]]``. A suffix of
    a context is a context too, so in ascending order of the codes a parent comes before its children.

        text ... the cat sat      "sat" = node a, "cat sat" = a << 32 | cat = node b, "the cat sat" = b << 32 | the
    """

    keys: np.ndarray  # (K,) int64 codes of the contexts, ascending
    offsets: np.ndarray  # (K + 1,) int64 start of the n-grams of each context
    grams: np.ndarray  # (G, n) int32 n-grams, the most frequent first within a context
    tokenizer_hash: str = ""  # of the vocabulary (`data.tokenizer.tokenizer_hash`)
    min_count: int = 1  # n-grams that occur less often were left out
    num_tokens: int = 0  # of the text
    sources: tuple[str, ...] = ()  # names of the files that the table was built from

    def _nodes(self, seq: Sequence[int]) -> list[int]:
        """The nodes of the suffixes of ``seq`` that are contexts, the shortest first, each less 1."""
        nodes, node = [], 0
        for token in reversed(seq):
            code = node << 32 | token
            index = int(self.keys.searchsorted(code))
            if index == len(self.keys) or self.keys[index] != code:
                break
            nodes.append(index)
            node = index + 1
        return nodes

    def _grams(self, node: int, count: int | None = None) -> list[tuple[int, ...]]:
        start, end = self.offsets[node : node + 2].tolist()
        return list(map(tuple, self.grams[start : end if count is None else min(end, start + count)].tolist()))

    def after(self, context: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the n-grams that follow exactly this context, the most frequent first."""
        nodes = self._nodes(context)
        return self._grams(nodes[-1]) if nodes and len(nodes) == len(context) else []

    def retrieve(
        self, seq: Sequence[int], max_grams: int, excluded: Collection[tuple[int, ...]] = ()
    ) -> list[tuple[int, ...]]:
        """Up to ``max_grams`` n-grams that may follow a text and are not ``excluded``, those of longer contexts first.

        Those of one context come the more frequent ones first. As in the code of Self-Draft, each context gives as many
        n-grams as are still missing, and duplicates among them are left out without replacement.
        """
        grams: list[tuple[int, ...]] = []
        for node in reversed(self._nodes(seq)):
            for gram in self._grams(node, max_grams - len(grams)):
                if gram not in grams and gram not in excluded:
                    grams.append(gram)
        return grams

    def save(self, path: str | Path) -> None:
        """Write the table to one safetensors file, atomically."""
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in ("keys", "offsets", "grams")}
        fields = {name: getattr(self, name) for name in ("tokenizer_hash", "min_count", "num_tokens", "sources")}
        metadata = {"format": FORMAT, "gram": self.grams.shape[1], **fields}
        with atomic_write(path) as new:
            # A single entry, because safetensors writes several in no fixed order.
            save_file(arrays, new, {"corpus": json.dumps(metadata)})

    @classmethod
    def load(cls, path: str | Path) -> CorpusTable:
        """Read a table that `save` wrote, or raise ValueError."""
        with reading(path, "make a corpus cache with `drafters index corpus OUT`"):
            with safe_open(path, framework="np") as file:
                metadata = json.loads((file.metadata() or {}).get("corpus", "{}"))
                if metadata.pop("format", None) != FORMAT:
                    raise ValueError("another kind of file")
                gram, sources = metadata.pop("gram"), tuple(metadata.pop("sources"))
                arrays = {name: file.get_tensor(name) for name in ("keys", "offsets", "grams")}
            table = cls(**arrays, **metadata, sources=sources)
            expected = (len(table.keys) + 1,), (table.offsets[-1], gram)
            if (table.offsets.shape, table.grams.shape) != expected or table.keys.ndim != 1:
                raise ValueError("its arrays do not fit each other")
            if table.offsets[0] != 0 or (np.diff(table.offsets) < 0).any() or (np.diff(table.keys) <= 0).any():
                raise ValueError("its contexts are not in order")
        return table


@register("corpus", "CORPUS", load=CorpusTable.load, argument="table", command="corpus")
class CorpusCache(Drafter):
    """Drafts n-grams of a fixed text that follow the last tokens: the corpus cache of the Self-Draft paper on its own.

    Args:
        table: The n-grams.
        num_chains: Number of n-grams drafted per step.
    """

    remembers = False

    def __init__(self, table: CorpusTable, num_chains: int = 3) -> None:
        check_at_least(1, num_chains=num_chains)
        self.table, self.num_chains = table, num_chains

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        tree = DraftTree.from_paths(self.table.retrieve(seq, self.num_chains))
        return tree.pruned(limits.max_depth, limits.max_nodes, limits.eos)
