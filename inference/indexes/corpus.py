"""``drafters corpus``: count the n-grams of text files into a corpus cache."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from data.files import disk_errors
from data.texts import text_paths
from data.tokenizer import load_tokenizer
from drafters.training_free.corpus import CorpusTable
from inference.indexes.documents import encoded, progress
from inference.outputs import folder_above, new_file
from inference.verifier.base import tokenizer_hash

NUM_FOLLOWING, MAX_CONTEXT = 4, 4  # tokens after a context, and tokens of a context, as in Self-Draft
BORDER = -1  # separates documents; no n-gram contains it
CHUNK = 1 << 26  # n-grams that are sorted at a time
BLOCK = 1 << 22  # positions that are read at a time


def corpus(
    out: str, tokenizer: str, files: list[str], min_count: int = 6, top: int = 20, overwrite: bool = False
) -> None:
    """Count which four tokens follow each sequence of one to four tokens, for self_draft, joint and corpus.

    A record of a .jsonl or .json file is one document if it has a field `text`; of questions with answers and of
    conversations, each part is a document. In other files, blank lines separate documents. No n-gram crosses the end of
    a document.

    Args:
        out: File to write.
        tokenizer: Folder or hub id of the base, or of its tokenizer.
        files: Text files, or records as .jsonl or .json, also compressed as .gz. May be repeated.
        min_count: Leave out n-grams that occur less often.
        top: Maximum number of n-grams for each context.
        overwrite: Replace an existing file.
    """
    if min_count < 1 or top < 1:
        raise ValueError(f"min_count and top must be at least 1, not {min_count} and {top}")
    path = new_file(out, overwrite)
    text_paths(files)
    loaded = load_tokenizer(tokenizer)
    with (
        progress(files, "count", MAX_CONTEXT + NUM_FOLLOWING) as (advance, complete),
        disk_errors(path),
        tempfile.TemporaryDirectory(dir=folder_above(path)) as temporary,
    ):
        num_tokens, folder = 0, Path(temporary)
        with (folder / "tokens").open("wb") as stream:
            for ids in encoded(files, loaded, advance):
                stream.write(np.array([*ids, BORDER], dtype=np.int32).tobytes())
                num_tokens += len(ids)
        tokens = np.memmap(folder / "tokens", np.int32, "r")
        arrays = count(tokens, min_count, top, folder, complete)
        del tokens
    if not len(arrays[0]):
        raise ValueError(
            f"no {1 + NUM_FOLLOWING} tokens in a row occur {min_count} times in {num_tokens} tokens: "
            "give more text, or a smaller --min-count"
        )
    sources = tuple(Path(file).name for file in files)
    CorpusTable(*arrays, tokenizer_hash(loaded), min_count, num_tokens, sources).save(path)
    print(f"wrote {out}: {len(arrays[2])} n-grams of {len(arrays[0])} contexts from {num_tokens} tokens")


def count(
    tokens: np.ndarray,
    min_count: int = 6,
    top: int = 20,
    folder: Path | None = None,
    complete: Callable[[int], object] = lambda length: None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the arrays of a `CorpusTable`: the n-grams that follow each context at least ``min_count`` times.

    Args:
        tokens: (S,) int32, the documents with `BORDER` between them.
        min_count: Leave out n-grams that occur less often.
        top: Maximum number of n-grams for each context; of equally frequent ones, those with smaller token ids.
        folder: Folder for a temporary file of the size of ``tokens``.
        complete: Called with each of the eight lengths when its n-grams are counted.
    """
    keys, sizes = np.empty(0, np.int64), [np.zeros(1, np.int64)]
    grams = [np.empty((0, NUM_FOLLOWING), np.int32)]
    for rows, counts in _frequent(tokens, min_count, folder):
        complete(rows.shape[1])
        width = rows.shape[1] - NUM_FOLLOWING  # of the context
        if width < 1:
            continue
        nodes = np.zeros(len(rows), np.int64)
        for column in range(width - 1, 0, -1):
            nodes = 1 + keys.searchsorted(nodes << 32 | rows[:, column])
        codes = nodes << 32 | rows[:, 0]
        order = np.lexsort((-counts, codes))
        contexts, first, num_grams = np.unique(codes[order], return_index=True, return_counts=True)
        rank = np.arange(len(rows)) - np.repeat(first, num_grams)
        keys = np.concatenate([keys, contexts])
        sizes.append(np.minimum(num_grams, min(top, len(rows))))
        grams.append(rows[order][rank < top, width:])
    return keys, np.concatenate(sizes).cumsum(), np.concatenate(grams)


def _frequent(tokens: np.ndarray, min_count: int, folder: Path | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the frequent n-grams of each length n = 1, 2, ..., 8: (F, n) in ascending order, and their counts (F,).

    An n-gram can only be frequent if its first n - 1 tokens are. So the frequent n-grams of a length are numbered, and
    an n-gram of the next length is coded as number << 32 | token. Besides these, memory holds `CHUNK` codes at a time.
    """
    rows, counts = np.empty((1, 0), np.int32), np.array([len(tokens)])
    with tempfile.TemporaryFile(dir=folder) as file:
        if len(tokens):  # on a full disk this raises OSError, where writing to the map would kill the process
            os.posix_fallocate(file.fileno(), 0, tokens.size * np.dtype(np.int32).itemsize)
        # The number of the frequent n-gram that starts at each position, BORDER if there is none.
        numbers = np.memmap(file, np.int32, "w+", shape=tokens.shape)
        for length in range(MAX_CONTEXT + NUM_FOLLOWING):
            parts = [_count_codes(numbers, tokens, length, *span, min_count) for span in _spans(counts)]
            codes = np.concatenate([np.empty(0, np.int64), *(codes for codes, _ in parts)])
            counts = np.concatenate([np.empty(0, np.int64), *(counts for _, counts in parts)])
            for start, coded in _codes(numbers, tokens, length):
                place = codes.searchsorted(coded).clip(max=max(0, len(codes) - 1))
                is_frequent = codes[place] == coded if len(codes) else np.zeros(len(coded), bool)
                numbers[start : start + len(coded)] = np.where(is_frequent, place, BORDER)
            rows = np.concatenate([rows[codes >> 32], (codes & 0xFFFFFFFF).astype(np.int32)[:, None]], axis=1)
            yield rows, counts


def _codes(numbers: np.ndarray, tokens: np.ndarray, length: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the codes of the n-grams of ``length`` + 1 tokens block by block, each with the block's first position.

    A code is negative where no frequent n-gram of ``length`` tokens starts.
    """
    for start in range(0, len(tokens) - length, BLOCK):
        end = min(start + BLOCK, len(tokens) - length)
        yield start, numbers[start:end].astype(np.int64) << 32 | tokens[start + length : end + length]


def _spans(counts: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield half-open ranges of numbers that together occur at most `CHUNK` times; a range has at least one number."""
    ends, first = counts.cumsum(), 0
    while first < len(counts):
        before = ends[first] - counts[first]
        last = max(first + 1, int(ends.searchsorted(before + CHUNK, "right")))
        yield first, last
        first = last


def _count_codes(
    numbers: np.ndarray, tokens: np.ndarray, length: int, first: int, last: int, min_count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes with numbers in [first, last) that occur at least ``min_count`` times, and their counts."""
    codes = counts = np.empty(0, np.int64)
    pending: list[np.ndarray] = []
    size = 0
    for _, coded in _codes(numbers, tokens, length):
        pending.append(coded[(coded >= first << 32) & (coded < last << 32)])
        size += len(pending[-1])
        if size >= CHUNK:
            codes, counts = _merged(codes, counts, pending)
            pending, size = [], 0
    codes, counts = _merged(codes, counts, pending)
    return codes[counts >= min_count], counts[counts >= min_count]


def _merged(codes: np.ndarray, counts: np.ndarray, pending: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Add the pending codes to the counts of the codes so far."""
    new, new_counts = np.unique(np.concatenate([np.empty(0, np.int64), *pending]), return_counts=True)
    if not len(codes):
        return new, new_counts
    both, place = np.unique(np.concatenate([codes, new]), return_inverse=True)
    return both, np.bincount(place, np.concatenate([counts, new_counts]), len(both)).astype(np.int64)
