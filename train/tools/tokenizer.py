"""``drafters tokenizer``: train a small byte-level BPE tokenizer for a base of your own."""

from __future__ import annotations

from pathlib import Path

from data import embedded
from data.files import atomic_folder, safe_text
from data.sharegpt import load_conversations
from inference.runs import folder_above

MAX_VOCABULARY = 1 << 20


def tokenizer(
    out: str, count: int = 4000, seed: int = 0, vocab_size: int = 1024, files: list[str] | None = None
) -> None:
    """Train a tokenizer on conversations, with the Vicuna chat template.

    Args:
        out: Folder to write.
        count: Number of conversations of the embedded corpus to train on.
        seed: Seed of the embedded corpus.
        vocab_size: Size of the vocabulary, including 256 bytes and three special tokens: at least 259.
        files: Conversations to train on instead of the embedded ones, as data.files of a training.
    """
    if (Path(out) / "tokenizer.json").exists():
        raise ValueError(f"{out} already holds a tokenizer: give another folder")
    if not 259 <= vocab_size <= MAX_VOCABULARY:
        raise ValueError(f"vocab_size {vocab_size}: from 259, 256 bytes and three special tokens, to {MAX_VOCABULARY}")
    if count < 1:
        raise ValueError(f"count must be at least 1, not {count}")
    folder_above(Path(out) / "tokenizer.json")  # raises ValueError if it cannot be made, as where a file stands
    conversations, dropped = load_conversations(files or [f"embedded:{count}:{seed}"])
    if dropped.total:
        print(safe_text(dropped))
    speakers = {"user": "human", "assistant": "gpt"}
    records = (
        {"conversations": [{"from": speakers[role], "value": text} for role, text in each.messages if role in speakers]}
        for each in conversations
    )
    trained = embedded.train_tokenizer(records, vocab_size)
    with atomic_folder(out) as folder:
        trained.save_pretrained(folder)
    print(f"wrote {out}: {len(trained)} tokens of {len(conversations):,} conversations")
