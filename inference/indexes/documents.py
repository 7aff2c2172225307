"""Text files as token ids for ``drafters corpus`` and ``drafters datastore``, with progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from data.texts import read_texts, text_paths
from inference.progress import progress_bars

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_CHARACTERS = 1 << 20  # encoded at a time


@contextmanager
def progress(
    files: list[str], title: str, total: int
) -> Iterator[tuple[Callable[[int], object], Callable[[int], object]]]:
    """Show a bar for reading the files and one for the work that follows.

    Yields:
        A function to call with the number of characters just read, and one to call with the part of ``total`` that is
        complete.
    """
    size = sum(path.stat().st_size for path in text_paths(files))
    with progress_bars("percent") as bars:
        reading, working = bars.add_task("read", total=size), bars.add_task(title, total=total)

        def advance_reading(num_characters: int) -> None:
            bars.advance(reading, num_characters)

        def complete_work(amount: int) -> None:
            # Characters and bytes differ in number, above all in .gz files, so the first bar is filled here.
            bars.update(reading, completed=size)
            bars.update(working, completed=amount)

        yield advance_reading, complete_work


def encoded(
    files: list[str], tokenizer: PreTrainedTokenizerBase, advance: Callable[[int], object]
) -> Iterator[list[int]]:
    """Yield the token ids of each document, without special tokens.

    Args:
        files: Text files, as for `read_texts`.
        tokenizer: Tokenizer of the base.
        advance: Called with the number of characters of each batch.

    Raises:
        ValueError: The files contain no text, or `read_texts` rejects one.
    """
    is_empty = True
    for batch in _batches(files):
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
            is_empty &= not ids
            yield ids
        advance(sum(map(len, batch)))
    if is_empty:
        raise ValueError(f"there is no text in {', '.join(files)}")


def _batches(files: list[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in read_texts(files):
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
