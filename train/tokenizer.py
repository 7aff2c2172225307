"""``drafters tokenizer``: a small byte-level BPE vocabulary for a base of one's own."""

from __future__ import annotations

from pathlib import Path

from data import embedded


def tokenizer(out: str, count: int = 4000, seed: int = 0, vocab_size: int = 1024) -> None:
    """Train a tokenizer on the embedded corpus, with the Vicuna chat template.

    Args:
        out: Folder to write.
        count: Conversations to train on.
        seed: Of the conversations.
        vocab_size: Tokens, special ones and 256 bytes included: at least 259.
    """
    if (Path(out) / "tokenizer.json").exists():
        raise ValueError(f"{out} already holds a tokenizer: give another folder")
    if vocab_size < 259:
        raise ValueError(f"vocab_size {vocab_size} is less than 259: 256 bytes and three special tokens")
    embedded.train_tokenizer(embedded.conversations(count, seed), vocab_size).save_pretrained(out)
    print(f"wrote {out}")
