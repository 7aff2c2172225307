"""Plain text as token ids, for ``drafters corpus`` and ``drafters datastore``, with bars for how far they are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from data.texts import read_texts, text_paths

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH = 1 << 20  # characters encoded at a time


@contextmanager
def progress(
    files: list[str], work: str, total: int
) -> Iterator[tuple[Callable[[int], object], Callable[[int], object]]]:
    """Bars for reading files and for the work that follows.

    Yields:
        What is told how many more characters were read, and what is told how much of ``total`` is done.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    size = sum(path.stat().st_size for path in text_paths(files))
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bars:
        reading, working = bars.add_task("read", total=size), bars.add_task(work, total=total)

        def done(amount: int) -> None:
            bars.update(reading, completed=size)  # there are more bytes than characters, in .gz fewer
            bars.update(working, completed=amount)

        yield lambda characters: bars.advance(reading, characters), done


def encoded(files: list[str], tokenizer: PreTrainedTokenizerBase, read: Callable[[int], object]) -> Iterator[list[int]]:
    """The token ids of each document, without special tokens; ``read`` is told of the characters.

    Raises:
        ValueError: There is no text in the files, or `read_texts` refuses one.
    """
    nothing = True
    for batch in _batches(files):
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
            nothing &= not ids
            yield ids
        read(sum(map(len, batch)))
    if nothing:
        raise ValueError(f"there is no text in {', '.join(files)}")


def _batches(files: list[str]) -> Iterator[list[str]]:
    batch, size = [], 0
    for text in read_texts(files):
        batch.append(text)
        size += len(text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
