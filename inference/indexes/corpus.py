"""``drafters corpus``: count the n-grams of text files into a corpus cache."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from data.texts import text_paths
from data.tokenizer import load_tokenizer
from drafters.training_free.corpus import CorpusTable
from inference.engine.base import tokenizer_hash
from inference.indexes.documents import encoded, progress
from inference.runs.outputs import folder_above, new_file

GRAM, LONGEST_KEY = 4, 4  # Self-Draft's
BORDER = -1  # stands between texts: no n-gram crosses it
CHUNK = 1 << 26  # n-grams sorted at a time
BLOCK = 1 << 22  # positions looked at at a time


def corpus(
    out: str, tokenizer: str, files: list[str], min_count: int = 6, top: int = 20, overwrite: bool = False
) -> None:
    """Count which four tokens follow each one to four tokens in a text, for the drafters self_draft and corpus.

    A text in .jsonl or .json is one document by its field `text`; of questions and answers, and of conversations, each
    part is one. In other files blank lines separate documents. No n-gram crosses a document's end.

    Args:
        out: File to write.
        tokenizer: Folder or hub id of the base, or of its tokenizer.
        files: Text files, or records as .jsonl or .json; .gz is read as well; may be repeated.
        min_count: N-grams that occur less often are left out.
        top: N-grams kept for each context.
        overwrite: Replace a file that is already there.
    """
    if min_count < 1 or top < 1:
        raise ValueError(f"min_count and top must be at least 1, not {min_count} and {top}")
    path = new_file(out, overwrite)
    text_paths(files)
    loaded = load_tokenizer(tokenizer)
    with (
        progress(files, "count", LONGEST_KEY + GRAM) as (read, counted),
        tempfile.TemporaryDirectory(dir=folder_above(path), prefix=".corpus-") as folder,
    ):
        num_tokens = 0
        with Path(folder, "tokens").open("wb") as stream:
            for ids in encoded(files, loaded, read):
                np.array([*ids, BORDER], dtype=np.int32).tofile(stream)
                num_tokens += len(ids)
        tokens = np.memmap(Path(folder, "tokens"), np.int32, "r")
        arrays = count(tokens, min_count, top, folder, counted)
        del tokens
    if not len(arrays[0]):
        raise ValueError(
            f"no {1 + GRAM} tokens in a row occur {min_count} times in {num_tokens} tokens: "
            "give more text, or a smaller --min-count"
        )
    sources = tuple(Path(file).name for file in files)
    CorpusTable(*arrays, tokenizer_hash(loaded), min_count, num_tokens, sources).save(path)
    print(f"wrote {out}: {len(arrays[2])} n-grams of {len(arrays[0])} contexts from {num_tokens} tokens")


def count(
    tokens: np.ndarray,
    min_count: int = 6,
    top: int = 20,
    folder: str | None = None,
    counted: Callable[[int], object] = lambda length: None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arrays of a `CorpusTable`: which n-grams follow each context at least ``min_count`` times.

    Args:
        tokens: (S,) int32 texts, with `BORDER` between them.
        min_count: N-grams that occur less often are left out.
        top: N-grams kept for each context; of equally frequent ones those of smaller token ids.
        folder: Where a temporary file of the size of ``tokens`` may lie.
        counted: Told each of the eight lengths once its n-grams are counted.
    """
    keys, sizes, grams = np.empty(0, np.int64), [np.zeros(1, np.int64)], [np.empty((0, GRAM), np.int32)]
    for rows, counts in _frequent(tokens, min_count, folder):
        counted(rows.shape[1])
        width = rows.shape[1] - GRAM  # of the context
        if width < 1:
            continue
        nodes = np.zeros(len(rows), np.int64)
        for column in range(width - 1, 0, -1):
            nodes = 1 + keys.searchsorted(nodes << 32 | rows[:, column])
        codes = nodes << 32 | rows[:, 0]
        order = np.lexsort((-counts, codes))
        found, first, number = np.unique(codes[order], return_index=True, return_counts=True)
        rank = np.arange(len(rows)) - np.repeat(first, number)
        keys = np.concatenate([keys, found])
        sizes.append(np.minimum(number, top))
        grams.append(rows[order][rank < top, width:])
    return keys, np.concatenate(sizes).cumsum(), np.concatenate(grams)


def _frequent(tokens: np.ndarray, min_count: int, folder: str | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The frequent n-grams of each length n = 1, 2, ..., 8: (F, n) in ascending order, and how often they occur (F,).

    An n-gram is numbered among its length's frequent ones and the next length is coded as number << 32 | token: only
    what is frequent goes on. Besides these, memory holds `CHUNK` codes at a time.
    """
    rows, counts = np.empty((1, 0), np.int32), np.array([len(tokens)])
    with tempfile.TemporaryFile(dir=folder) as file:
        numbers = np.memmap(file, np.int32, "w+", shape=tokens.shape)  # of the n-gram that starts at each position
        for length in range(LONGEST_KEY + GRAM):
            found = [_tally(numbers, tokens, length, *span, min_count) for span in _spans(counts)]
            codes = np.concatenate([np.empty(0, np.int64), *(codes for codes, _ in found)])
            counts = np.concatenate([np.empty(0, np.int64), *(counts for _, counts in found)])
            for start, coded in _codes(numbers, tokens, length):
                place = codes.searchsorted(coded).clip(max=max(0, len(codes) - 1))
                known = codes[place] == coded if len(codes) else np.zeros(len(coded), bool)
                numbers[start : start + len(coded)] = np.where(known, place, BORDER)
            rows = np.concatenate([rows[codes >> 32], (codes & 0xFFFFFFFF).astype(np.int32)[:, None]], axis=1)
            yield rows, counts


def _codes(numbers: np.ndarray, tokens: np.ndarray, length: int) -> Iterator[tuple[int, np.ndarray]]:
    """Codes of the n-grams of ``length`` + 1 tokens, block by block; negative where there is none."""
    for start in range(0, len(tokens) - length, BLOCK):
        end = min(start + BLOCK, len(tokens) - length)
        yield start, numbers[start:end].astype(np.int64) << 32 | tokens[start + length : end + length]


def _spans(counts: np.ndarray) -> Iterator[tuple[int, int]]:
    """Half-open ranges of numbers that occur `CHUNK` times together at most, or are one."""
    ends, first = counts.cumsum(), 0
    while first < len(counts):
        before = ends[first] - counts[first]
        last = max(first + 1, int(ends.searchsorted(before + CHUNK, "right")))
        yield first, last
        first = last


def _tally(
    numbers: np.ndarray, tokens: np.ndarray, length: int, first: int, last: int, min_count: int
) -> tuple[np.ndarray, np.ndarray]:
    """The codes of n-grams that begin with numbers in [first, last) and occur ``min_count`` times, and how often."""
    codes = counts = np.empty(0, np.int64)
    held, size = [], 0
    for _, coded in _codes(numbers, tokens, length):
        held.append(coded[(coded >= first << 32) & (coded < last << 32)])
        size += len(held[-1])
        if size >= CHUNK:
            codes, counts = _merged(codes, counts, held)
            held, size = [], 0
    codes, counts = _merged(codes, counts, held)
    return codes[counts >= min_count], counts[counts >= min_count]


def _merged(codes: np.ndarray, counts: np.ndarray, held: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    new, number = np.unique(np.concatenate([np.empty(0, np.int64), *held]), return_counts=True)
    if not len(codes):
        return new, number
    both, place = np.unique(np.concatenate([codes, new]), return_inverse=True)
    return both, np.bincount(place, np.concatenate([counts, number]), len(both)).astype(np.int64)
