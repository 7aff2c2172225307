"""The suffix array of a large text: all places of a phrase lie side by side in it, and so do its continuations."""

from __future__ import annotations

import json
import mmap
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from drafters.atomic_write import atomic_write

FORMAT = "drafters-suffix-array-1"
DTYPES = {"U16": np.uint16, "I32": np.int32, "U32": np.uint32, "U64": np.uint64}  # by their names in safetensors


@dataclass(frozen=True, eq=False)
class SuffixArray:
    """A text whose places are sorted by what stands there, so that all places of one phrase lie side by side.

    Behind every document stands a border, the greatest number of the tokens' type; so among a phrase's places those
    where its document ends come last.

    Args:
        tokens: (N,) uint16 or int32 documents, each with a border behind it.
        suffixes: (S,) uint32 places of the S tokens, sorted by the ``depth`` tokens from there on, then by place.
        heads: (S,) uint64 the first four tokens (two, where tokens are int32) at each of these places, in one number.
        depth: So many tokens of a place decide its rank.
        tokenizer_hash: Name of the vocabulary (`inference.engine.base.tokenizer_hash`).
        sources: Names of the files it was built from.
    """

    tokens: np.ndarray
    suffixes: np.ndarray
    heads: np.ndarray
    depth: int
    tokenizer_hash: str = ""
    sources: tuple[str, ...] = ()

    @classmethod
    def build(
        cls,
        documents: Iterable[Sequence[int]],
        depth: int = 32,
        tokenizer_hash: str = "",
        sources: tuple[str, ...] = (),
        sorted_by: Callable[[int], object] = lambda width: None,
    ) -> SuffixArray:
        """Sort a text; memory holds about 45 bytes for each of its tokens.

        Args:
            documents: Token ids; empty ones are left out.
            depth: Tokens to sort by, at least 2: those looked up and those that follow them, together.
            tokenizer_hash: Name of the vocabulary.
            sources: Names of the files.
            sorted_by: Told after each round how many tokens the places are sorted by.

        Raises:
            ValueError: The text is empty or too long, or the depth too small.
        """
        if depth < 2:
            raise ValueError(f"depth must be at least 2, not {depth}")
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
        """Each has its border."""
        return len(self.tokens) - len(self.suffixes)

    @cached_property
    def border(self) -> int:
        """What stands behind every document."""
        return int(np.iinfo(self.tokens.dtype).max)

    @cached_property
    def _views(self) -> tuple[memoryview, memoryview, memoryview]:
        """Read one by one, numbers come several times faster from a memoryview than from an array."""
        return memoryview(self.tokens), memoryview(self.suffixes), memoryview(self.heads)

    def row(self, phrase: Sequence[int], first: int = 0, last: int | None = None) -> int:
        """The first of rows [first, last) where ``phrase``, or what comes after it, stands; ``last`` if there is none.

        Most of the way goes over the heads, which are compared as numbers.
        """
        text, places, heads = self._views
        bits, in_head, width = 8 * text.itemsize, 8 // text.itemsize, len(phrase)
        head = 0
        for token in phrase[:in_head]:
            head = head << bits | token
        if width <= in_head:
            return bisect_left(heads, head << bits * (in_head - width), first, last)
        first = bisect_left(heads, head, first, last)
        last = bisect_left(heads, head + 1, first, last)
        rest = list(phrase[in_head:])
        return bisect_left(places, rest, first, last, key=lambda at: text[at + in_head : at + width].tolist())

    def longest_match(self, seq: Sequence[int], longest: int, shortest: int) -> tuple[int, int, int]:
        """Where the longest end of ``seq`` stands with a token of the same document behind it.

        Where a phrase stands its ends stand too: its length is galloped to from the shortest, then bisected.

        Args:
            seq: Tokens, at least one.
            longest: Tokens of the longest end that is looked up.
            shortest: Tokens of the shortest.

        Returns:
            Rows [first, last) of the hits and the length of the end; all 0 where there is none.
        """
        text, places, _ = self._views
        tail, border = seq[-longest:], self.border
        first = length = 0
        low, stride = shortest - 1, 1
        high = len(tail) + 1 if max(tail) < border else 0  # a token no document can hold
        while high - low > 1:
            width = min(low + stride, (low + high) // 2)
            phrase = tail[-width:]
            row = self.row(phrase)
            place = places[row] if row < len(places) else 0
            there = text[place : place + width + 1].tolist()
            if there[:width] == phrase and there[width] != border:
                first, length, low, stride = row, width, width, 2 * stride
            else:
                high = width
        return (first, self.row([*tail[-length:], border], first), length) if length else (0, 0, 0)

    def continuations(self, first: int, last: int, offset: int, length: int) -> list[list[int]]:
        """The ``length`` tokens from ``offset`` on behind rows [first, last), up to the document's end."""
        text, places, _ = self._views
        found = []
        for place in places[first:last]:
            tokens = text[place + offset : place + offset + length].tolist()
            found.append(tokens[: tokens.index(self.border)] if self.border in tokens else tokens)
        return found

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, which appears whole or not at all."""
        arrays = {name: getattr(self, name) for name in ("tokens", "suffixes", "heads")}
        about = {name: getattr(self, name) for name in ("depth", "tokenizer_hash", "sources")}
        with atomic_write(path) as new:
            save_file(arrays, new, {"suffix_array": json.dumps({"format": FORMAT, **about})})

    @classmethod
    def open(cls, path: str | Path) -> SuffixArray:
        """Map what `save` wrote into memory: its numbers are read when they are asked for, whatever its size.

        Raises:
            ValueError: The file is missing, damaged, or no datastore.
        """
        if not Path(path).is_file():
            raise ValueError(f"no datastore at {path}: make one with `drafters datastore OUT`")
        try:
            with Path(path).open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            start = 8 + int.from_bytes(mapped[:8], "little")  # the header's length, the header, the arrays
            header = json.loads(mapped[8:start])
            about = json.loads(header["__metadata__"]["suffix_array"])
            if about.pop("format") != FORMAT:
                raise ValueError("another kind of file")
            arrays = {}
            for name in ("tokens", "suffixes", "heads"):
                (size,), dtype = header[name]["shape"], DTYPES[header[name]["dtype"]]
                arrays[name] = np.frombuffer(mapped, dtype, size, start + header[name]["data_offsets"][0])
            store = cls(**arrays, **about | {"sources": tuple(about["sources"])})
            if not 0 < len(store.suffixes) == len(store.heads) < len(store.tokens):
                raise ValueError("its arrays do not fit each other")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is no datastore ({error}): build it again with `drafters datastore OUT`"
            ) from error
        return store


def _sorted_places(tokens: np.ndarray, depth: int, sorted_by: Callable[[int], object]) -> np.ndarray:
    """Places (N,) by the ``depth`` tokens from there on, then by place; the text's end is less than any token.

    Prefix doubling: ranks by w tokens, taken in pairs w apart, sort by 2 w tokens.
    """
    ranks = tokens.astype(np.uint64) + 1  # by one token; 0 is the end
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
