"""The corpus cache: what follows the last words most often in a large text, kept in one file."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from drafters.atomic_write import atomic_write
from drafters.protocol import Drafter, Limits
from drafters.tree import DraftTree

FORMAT = "drafters-corpus-1"


@dataclass(frozen=True)
class CorpusTable:
    """Frequent n-grams by the tokens before them (Self-Draft paper, "Draft Cache Initialization").

    The contexts form a trie that is read backwards, from the last token on. Node 0 is the empty context; node i > 0
    has the code ``keys[i - 1]`` = parent << 32 | token, its n-grams are ``grams[offsets[i - 1] : offsets[i]]``. A
    context's ending is a context too, so codes that ascend put shorter contexts first and every parent has a number.

        text ... the cat sat      "sat" = node a, "cat sat" = a << 32 | cat = node b, "the cat sat" = b << 32 | the

    Args:
        keys: (K,) int64 codes, ascending.
        offsets: (K + 1,) int64.
        grams: (G, n) int32, the most frequent first within a context.
        tokenizer_hash: Name of the vocabulary (`inference.engine.base.tokenizer_hash`).
        min_count: N-grams seen less often were left out.
        num_tokens: Size of the text.
        sources: Names of the files it was built from.
    """

    keys: np.ndarray
    offsets: np.ndarray
    grams: np.ndarray
    tokenizer_hash: str = ""
    min_count: int = 1
    num_tokens: int = 0
    sources: tuple[str, ...] = ()

    def after(self, context: Sequence[int]) -> list[tuple[int, ...]]:
        """The n-grams kept for exactly this context, the most frequent first."""
        node = 0
        for token in reversed(context):
            code = node << 32 | token
            node = 1 + int(self.keys.searchsorted(code))
            if node > len(self.keys) or self.keys[node - 1] != code:
                return []
        start, end = self.offsets[node - 1 : node + 1].tolist() if node else (0, 0)
        return list(map(tuple, self.grams[start:end].tolist()))

    def retrieve(self, seq: Sequence[int], most: int, known: Collection[tuple[int, ...]] = ()) -> list[tuple[int, ...]]:
        """At most ``most`` n-grams that may follow ``seq``: longer contexts first, then the more frequent.

        As in the code of Self-Draft, each context is asked for as many as are still missing, and those found before
        or ``known`` are left out without replacement.
        """
        nodes, node = [], 0
        for token in reversed(seq):
            code = node << 32 | token
            index = int(self.keys.searchsorted(code))
            if index == len(self.keys) or self.keys[index] != code:
                break
            nodes.append(index)
            node = index + 1
        found: list[tuple[int, ...]] = []
        for index in reversed(nodes):
            start, end = self.offsets[index : index + 2].tolist()
            for gram in map(tuple, self.grams[start : min(end, start + most - len(found))].tolist()):
                if gram not in found and gram not in known:
                    found.append(gram)
        return found

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, which appears whole or not at all."""
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in ("keys", "offsets", "grams")}
        rest = {name: getattr(self, name) for name in ("tokenizer_hash", "min_count", "num_tokens", "sources")}
        about = {"format": FORMAT, "gram": self.grams.shape[1], **rest}
        with atomic_write(path) as new:
            save_file(arrays, new, {"corpus": json.dumps(about)})  # one entry: several are written in no fixed order

    @classmethod
    def load(cls, path: str | Path) -> CorpusTable:
        """Read what `save` wrote.

        Raises:
            ValueError: The file is missing, damaged, or no corpus cache.
        """
        if not Path(path).is_file():
            raise ValueError(f"no corpus cache at {path}: make one with `drafters corpus OUT`")
        try:
            with safe_open(path, framework="np") as file:
                about = json.loads((file.metadata() or {}).get("corpus", "{}"))
                if about.pop("format", None) != FORMAT:
                    raise ValueError("another kind of file")
                gram, sources = about.pop("gram"), tuple(about.pop("sources"))
                arrays = {name: file.get_tensor(name) for name in ("keys", "offsets", "grams")}
            table = cls(**arrays, **about, sources=sources)
            places = (len(table.keys) + 1,), (table.offsets[-1], gram)
            if (table.offsets.shape, table.grams.shape) != places:
                raise ValueError("its arrays do not fit each other")
        except (SafetensorError, OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is no corpus cache ({error}): build it again with `drafters corpus OUT`"
            ) from error
        return table


class CorpusCache(Drafter):
    """The corpus cache alone: n-grams of a fixed text, found by the last tokens (Self-Draft paper).

    Args:
        table: The n-grams.
        num_chains: N-grams drafted a step.
    """

    history_only = True
    remembers = False

    def __init__(self, table: CorpusTable, num_chains: int = 3) -> None:
        if num_chains < 1:
            raise ValueError(f"num_chains must be at least 1, got {num_chains}")
        self.table, self.num_chains = table, num_chains

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        tree = DraftTree.from_paths(self.table.retrieve(seq, self.num_chains))
        return tree.pruned(limits.max_depth, limits.max_nodes, limits.eos)
