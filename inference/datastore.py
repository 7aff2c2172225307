"""``drafters datastore``: sort a large text into the suffix array that the drafter rest looks things up in."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from data.texts import read_texts
from data.tokenizer import load_tokenizer
from drafters.training_free.suffix_array import SuffixArray
from inference.base import tokenizer_hash

BATCH = 1 << 20  # characters encoded at a time


def datastore(out: str, tokenizer: str, files: list[str], depth: int = 32, overwrite: bool = False) -> None:
    """Sort the tokens of text files into a datastore, for the drafter rest.

    A text in .jsonl or .json is one document by its field `text`; of questions and answers, and of conversations, each
    part is one. In other files blank lines separate documents. No match and no draft crosses a document's end. The file
    takes 14 bytes a token (16 with more than 65,535 ids), the work about 45 bytes of memory.

    Args:
        out: File to write.
        tokenizer: Folder or hub id of the base, or of its tokenizer.
        files: Text files, or records as .jsonl or .json; .gz is read as well; may be repeated.
        depth: Tokens the text is sorted by; bounds what rest looks up and continues with, together.
        overwrite: Replace a file that is already there.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    path = Path(out)
    if path.is_dir() or (path.exists() and not overwrite):
        raise ValueError(f"{out} is already there: give another name{'' if path.is_dir() else ', or --overwrite'}")
    if depth < 2:
        raise ValueError(f"depth must be at least 2, not {depth}")
    if not files:
        raise ValueError("no text: give at least one --files FILE")
    loaded = load_tokenizer(tokenizer)
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        reading = progress.add_task("read", total=None, note="")
        sorting = progress.add_task("sort", total=depth, start=False, note="")
        num_documents = num_tokens = 0

        def documents() -> Iterator[list[int]]:
            nonlocal num_documents, num_tokens
            for ids in encoded(read_texts(files), loaded):
                num_documents, num_tokens = num_documents + bool(ids), num_tokens + len(ids)
                progress.update(reading, note=f"{num_documents} documents, {num_tokens} tokens")
                yield ids
            if not num_tokens:
                raise ValueError(f"there is no text in {', '.join(files)}")
            progress.update(reading, total=1, completed=1)
            progress.start_task(sorting)

        sources = tuple(Path(file).name for file in files)
        store = SuffixArray.build(
            documents(), depth, tokenizer_hash(loaded), sources, lambda width: progress.update(sorting, completed=width)
        )
    store.save(path)
    print(f"wrote {out}: {num_tokens} tokens in {num_documents} documents")


def encoded(texts: Iterable[str], tokenizer) -> Iterator[list[int]]:
    """The token ids of each text, without special tokens."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH:
            yield from tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
            batch, size = [], 0
    if batch:
        yield from tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
