"""``drafters datastore``: sort a large text into the suffix array that the drafter rest looks things up in."""

from __future__ import annotations

from pathlib import Path

from data.texts import text_paths
from data.tokenizer import load_tokenizer
from drafters.training_free.suffix_array import SuffixArray
from inference.engine.base import tokenizer_hash
from inference.indexes.documents import encoded, progress
from inference.runs.outputs import new_file


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
    if depth < 2:
        raise ValueError(f"depth must be at least 2, not {depth}")
    path = new_file(out, overwrite)
    text_paths(files)
    loaded = load_tokenizer(tokenizer)
    sources = tuple(Path(file).name for file in files)
    with progress(files, "sort", depth) as (read, sorted_by):
        store = SuffixArray.build(encoded(files, loaded, read), depth, tokenizer_hash(loaded), sources, sorted_by)
    store.save(path)
    print(f"wrote {out}: {len(store.suffixes)} tokens in {store.num_documents} documents")
