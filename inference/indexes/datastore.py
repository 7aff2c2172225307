"""``drafters datastore``: build the suffix array of a large text, in which the drafter rest looks up its drafts."""

from __future__ import annotations

from pathlib import Path

from data.texts import text_paths
from data.tokenizer import load_tokenizer
from drafters.training_free.suffix_array import SuffixArray, check_depth
from inference.indexes.documents import encoded, progress
from inference.outputs import new_file
from inference.verifier.base import tokenizer_hash


def datastore(out: str, tokenizer: str, files: list[str], depth: int = 32, overwrite: bool = False) -> None:
    """Sort the tokens of text files into a datastore for the drafter rest.

    A record of a .jsonl or .json file is one document if it has a field `text`; of questions with answers and of
    conversations, each part is a document. In other files, blank lines separate documents. No match and no draft
    crosses the end of a document. The file takes 14 bytes per token (16 with more than 65,535 token ids), and building
    it takes about 45 bytes of memory per token.

    Args:
        out: File to write.
        tokenizer: Folder or hub id of the base, or of its tokenizer.
        files: Text files, or records as .jsonl or .json, also compressed as .gz. May be repeated.
        depth: Number of tokens by which the text is sorted; the longest match and draft of rest together.
        overwrite: Replace an existing file.
    """
    check_depth(depth)
    path = new_file(out, overwrite)
    text_paths(files)
    loaded = load_tokenizer(tokenizer)
    sources = tuple(Path(file).name for file in files)
    with progress(files, "sort", depth) as (advance, complete):
        store = SuffixArray.build(encoded(files, loaded, advance), depth, tokenizer_hash(loaded), sources, complete)
    store.save(path)
    print(f"wrote {out}: {len(store.suffixes)} tokens in {store.num_documents} documents")
