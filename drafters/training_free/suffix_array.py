"""The suffix array of a large text, which finds all occurrences of a phrase by bisection."""

from __future__ import annotations

import json
import mmap
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from data.files import atomic_write, reading
from drafters.checks import check_at_least, check_at_most

FORMAT = "drafters-suffix-array-1"
MAX_DEPTH = 4096  # far more tokens than any draft has
DTYPES = {"U16": np.uint16, "I32": np.int32, "U32": np.uint32, "U64": np.uint64}  # by their names in safetensors


@dataclass(frozen=True, eq=False)
class SuffixArray:
    """The positions of a text, sorted by the tokens that follow, so that all occurrences of a phrase are adjacent.

    After every document there is a border, the largest number of the tokens' dtype. Among the occurrences of a phrase,
    those at the end of a document therefore come last.
    """

    tokens: np.ndarray  # (N,) uint16 or int32 tokens of the documents, with a border after each
    suffixes: np.ndarray  # (S,) uint32 positions of the S tokens, sorted by the tokens from there, then by position
    heads: np.ndarray  # (S,) uint64 the first four tokens (two of int32) from each of these positions as one number
    depth: int  # number of tokens that the positions are sorted by
    tokenizer_hash: str = ""  # of the vocabulary (`data.tokenizer.tokenizer_hash`)
    sources: tuple[str, ...] = ()  # names of the files that the text was read from

    @classmethod
    def build(
        cls,
        documents: Iterable[Sequence[int]],
        depth: int = 32,
        tokenizer_hash: str = "",
        sources: tuple[str, ...] = (),
        sorted_by: Callable[[int], object] = lambda width: None,
    ) -> SuffixArray:
        """Build the suffix array of documents of token ids, which takes about 45 bytes of memory per token.

        ``depth`` tokens, 2 to `MAX_DEPTH`, are the longest look-up and the tokens read after it, together.
        ``sorted_by`` is called after each round of sorting with the number of tokens that the positions are sorted by.
        Raises ValueError if the text is empty or too long.
        """
        check_depth(depth)
        text, borders = array("i"), array("q")
        for document in documents:
            if len(document):
                text.extend(document)
                borders.append(len(text))
                text.append(0)
        if not 0 < len(text) < 1 << 32:
            raise ValueError(f"a datastore takes 1 to {(1 << 32) - 1} tokens, borders included, not {len(text)}")
        wide = np.frombuffer(text, dtype=np.int32)
        tokens = wide.astype(np.uint16 if wide.max() < np.iinfo(np.uint16).max else np.int32)
        tokens[np.frombuffer(borders, dtype=np.int64)] = np.iinfo(tokens.dtype).max
        suffixes = _sorted_places(tokens, depth, sorted_by)[: -len(borders)].astype(np.uint32)
        heads = np.zeros(len(tokens), dtype=np.uint64)
        for offset in range(8 // tokens.itemsize):
            heads <<= np.uint64(8 * tokens.itemsize)
            heads[: len(tokens) - offset] |= tokens[offset:].astype(np.uint64)
        return cls(tokens, suffixes, heads[suffixes], depth, tokenizer_hash, sources)

    @property
    def num_documents(self) -> int:
        """Number of documents, each of which has one border."""
        return len(self.tokens) - len(self.suffixes)

    @cached_property
    def border(self) -> int:
        """The number after every document."""
        return int(np.iinfo(self.tokens.dtype).max)

    @cached_property
    def _views(self) -> tuple[memoryview, memoryview, memoryview]:
        """The arrays as memoryviews, from which single numbers are read several times faster."""
        return self.tokens.data, self.suffixes.data, self.heads.data

    def row(self, phrase: Sequence[int], first: int = 0) -> int:
        """Find the first of the rows from ``first`` on whose tokens are not less than ``phrase``, or their number.

        Most of the bisection compares the heads, which are plain numbers.
        """
        text, places, heads = self._views
        bits, in_head, width = 8 * text.itemsize, 8 // text.itemsize, len(phrase)
        head = 0
        for token in phrase[:in_head]:
            head = head << bits | token
        if width <= in_head:
            return bisect_left(heads, head << bits * (in_head - width), first)
        first = bisect_left(heads, head, first)
        last = bisect_left(heads, head + 1, first)
        rest = list(phrase[in_head:])
        return bisect_left(places, rest, first, last, key=lambda at: text[at + in_head : at + width].tolist())

    def longest_match(self, seq: Sequence[int], longest: int, shortest: int) -> tuple[int, int, int]:
        """Find the longest suffix of ``seq`` that occurs with a token of the same document after it.

        If a phrase occurs, its suffixes occur too. So the length, from ``shortest`` to ``longest``, is found by
        galloping, then by bisection. Returns rows [first, last) of the occurrences and the length of the suffix; all 0
        if there is none.
        """
        text, places, _ = self._views
        tail, border = seq[-longest:], self.border
        first = length = 0
        low, stride = shortest - 1, 1
        high = len(tail) + 1 if max(tail) < border else 0  # a border or a larger number occurs in no document
        while high - low > 1:
            width = min(low + stride, (low + high) // 2)
            phrase = tail[-width:]
            row = self.row(phrase)
            place = places[row] if row < len(places) else 0
            tokens = text[place : place + width + 1].tolist()
            if tokens[:width] == phrase and tokens[width] != border:
                first, length, low, stride = row, width, width, 2 * stride
            else:
                high = width
        return (first, self.row([*tail[-length:], border], first), length) if length else (0, 0, 0)

    def save(self, path: str | Path) -> None:
        """Write the suffix array to one safetensors file, atomically."""
        arrays = {name: getattr(self, name) for name in ("tokens", "suffixes", "heads")}
        metadata = {name: getattr(self, name) for name in ("depth", "tokenizer_hash", "sources")}
        with atomic_write(path) as new:
            save_file(arrays, new, {"suffix_array": json.dumps({"format": FORMAT, **metadata})})

    @classmethod
    def open(cls, path: str | Path) -> SuffixArray:
        """Map a file that `save` wrote into memory, of which only what is used is read, or raise ValueError."""
        with reading(path, "make a datastore with `drafters index datastore OUT`"):
            with Path(path).open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            start = 8 + int.from_bytes(mapped[:8], "little")  # safetensors: length of the header, header, arrays
            header = json.loads(mapped[8:start])
            metadata = json.loads(header["__metadata__"]["suffix_array"])
            if metadata.pop("format") != FORMAT:
                raise ValueError("another kind of file")
            arrays: dict[str, Any] = {}
            for name in ("tokens", "suffixes", "heads"):
                (size,), dtype = header[name]["shape"], DTYPES[header[name]["dtype"]]
                arrays[name] = np.frombuffer(mapped, dtype, size, start + header[name]["data_offsets"][0])
            store = cls(**arrays, **metadata | {"sources": tuple(metadata["sources"])})
            dtypes = store.tokens.dtype in (np.uint16, np.int32), store.suffixes.dtype, store.heads.dtype
            if dtypes != (True, np.uint32, np.uint64) or not all(array.flags.aligned for array in arrays.values()):
                raise ValueError("its arrays have other types or places")
            if not 0 < len(store.suffixes) == len(store.heads) < len(store.tokens):
                raise ValueError("its arrays do not fit each other")
            if store.tokens[-1] != store.border:
                raise ValueError("its text does not end with a border")
        return store


def check_depth(depth: int) -> None:
    """Raise ValueError if a text cannot be sorted by so many tokens."""
    check_at_least(2, depth=depth)
    check_at_most(MAX_DEPTH, depth=depth)


def _sorted_places(tokens: np.ndarray, depth: int, sorted_by: Callable[[int], object]) -> np.ndarray:
    """Sort the positions (N,) by the ``depth`` tokens from there, then by position.

    Prefix doubling: pairs of ranks by w tokens, taken w apart, sort by 2 w tokens. The end of the text is less than any
    token.
    """
    ranks = tokens.astype(np.uint64) + 1  # ranks by one token; 0 is the end of the text
    width = 1
    while width < depth:
        step = min(width, depth - width)
        pairs = ranks << 32
        pairs[:-step] |= ranks[step:]
        order = np.argsort(pairs, kind="stable")
        pairs = pairs[order]
        ranks[order[0]] = 1
        ranks[order[1:]] = 1 + np.cumsum(pairs[1:] != pairs[:-1], dtype=np.uint64)
        width += step
        sorted_by(width)
    return order
