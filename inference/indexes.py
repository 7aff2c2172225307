"""``drafters index``: count the n-grams of texts, or sort texts into the datastore of the drafter rest."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.progress import TaskProgressColumn

from data.conversations import read_texts
from data.sources import text_paths
from data.tokenizer import load_tokenizer, tokenizer_hash
from drafters.checks import check_at_least
from drafters.training_free.corpus import CorpusTable
from drafters.training_free.suffix_array import SuffixArray, check_depth
from inference.runs import new_file, progress_bars

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_FOLLOWING, MAX_CONTEXT = 4, 4  # tokens after a context, and tokens of a context, as in Self-Draft
BORDER = -1  # separates documents; no n-gram contains it
BATCH_SIZE = 256  # documents encoded at a time

Advance = Callable[[int], object]


def index(
    kind: str, out: str, tokenizer: str, files: list[str], min_count: int, top: int, depth: int, overwrite: bool
) -> None:
    """Run `drafters index`, see `inference.commands.index`."""
    check_at_least(1, min_count=min_count, top=top)
    check_depth(depth)
    path = new_file(out, overwrite, files)
    size = sum(file.stat().st_size for file in text_paths(files))
    loaded, sources = load_tokenizer(tokenizer), tuple(Path(file).name for file in files)
    with progress_bars(TaskProgressColumn()) as bars:
        read = bars.add_task("read", total=size)
        work = bars.add_task(kind, total=MAX_CONTEXT + NUM_FOLLOWING if kind == "corpus" else depth)

        def complete(amount: int) -> None:
            # Characters and bytes differ in number, above all in .gz files, so the first bar is filled here.
            bars.update(read, completed=size)
            bars.update(work, completed=amount)

        documents = encoded(files, loaded, partial(bars.advance, read))
        if kind == "corpus":
            tokens = array("i", (token for ids in documents for token in (*ids, BORDER)))
            arrays = count(np.frombuffer(tokens, np.int32), min_count, top, complete)
        else:
            store = SuffixArray.build(documents, depth, tokenizer_hash(loaded), sources, complete)
    if kind == "corpus":
        num_tokens = len(tokens) - tokens.count(BORDER)
        if not len(arrays[0]):
            raise ValueError(
                f"no {1 + NUM_FOLLOWING} tokens in a row occur {min_count} times in {num_tokens} tokens: "
                "give more text, or a smaller --min_count"
            )
        CorpusTable(*arrays, tokenizer_hash(loaded), min_count, num_tokens, sources).save(path)
        print(f"wrote {out}: {len(arrays[2])} n-grams of {len(arrays[0])} contexts from {num_tokens} tokens")
    else:
        store.save(path)
        print(f"wrote {out}: {len(store.suffixes)} tokens in {store.num_documents} documents")


# ---- texts as tokens


def encoded(files: list[str], tokenizer: PreTrainedTokenizerBase, advance: Advance) -> Iterator[list[int]]:
    """Yield the token ids of each document of `read_texts`, without special tokens.

    ``advance`` is called with the number of characters of each batch. Raises ValueError if the files contain no text,
    or `read_texts` rejects one.
    """
    texts, is_empty = read_texts(files), True
    for batch in iter(lambda: list(islice(texts, BATCH_SIZE)), []):
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
            is_empty &= not ids
            yield ids
        advance(sum(map(len, batch)))
    if is_empty:
        raise ValueError(f"there is no text in {', '.join(files)}")


# ---- n-grams


def count(
    tokens: np.ndarray, min_count: int = 6, top: int = 20, complete: Advance = lambda length: None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the arrays of a `CorpusTable`: the ``top`` n-grams that follow each context ``min_count`` times or more.

    Of equally frequent ones, those with smaller token ids are taken. The tokens (S,) int32 are the documents with
    `BORDER` between them. ``complete`` is called with each of the eight lengths when its n-grams are counted.
    """
    keys, sizes = np.empty(0, np.int64), [np.zeros(1, np.int64)]
    grams = [np.empty((0, NUM_FOLLOWING), np.int32)]
    for rows, counts in _frequent(tokens, min_count):
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


def _frequent(tokens: np.ndarray, min_count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the frequent n-grams of each length n = 1, 2, ..., 8: (F, n) in ascending order, and their counts (F,).

    An n-gram can only be frequent if its first n - 1 tokens are. So the frequent n-grams of a length are numbered, and
    an n-gram of the next length is coded as number << 32 | token.
    """
    rows = np.empty((1, 0), np.int32)
    numbers = np.zeros(len(tokens), np.int64)  # of the frequent n-gram that starts at each position, BORDER if none
    for length in range(MAX_CONTEXT + NUM_FOLLOWING):
        coded = numbers[: len(tokens) - length] << 32 | tokens[length:]  # negative where a part is BORDER
        codes, places, counts = np.unique(coded, return_inverse=True, return_counts=True)
        is_frequent = (codes >= 0) & (counts >= min_count)
        numbers = np.where(is_frequent, is_frequent.cumsum() - 1, BORDER)[places]
        codes, counts = codes[is_frequent], counts[is_frequent]
        rows = np.concatenate([rows[codes >> 32], (codes & 0xFFFFFFFF).astype(np.int32)[:, None]], axis=1)
        yield rows, counts
