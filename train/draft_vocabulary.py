"""Chooses the draft vocabulary of a drafter from the text that it is trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from data.rows import assistant_token_counts
from drafters.nn.draft_vocabulary import most_frequent
from drafters.protocol import LearnedDrafter
from inference.verifier.base import Base

if TYPE_CHECKING:
    from datasets import Dataset


def choose_draft_tokens(drafter: LearnedDrafter, base: Base, rows: Dataset | None) -> None:
    """Let a drafter with a draft vocabulary draft the assistant's most frequent tokens in the training text.

    End-of-sequence tokens are always among them, and so are the special tokens that the assistant writes, such as the
    end marks of a chat template. A drafter for the whole vocabulary stays as it is. All processes choose the same.

    Args:
        drafter: The drafter.
        base: The base that it drafts for.
        rows: The tokenised training set.

    Raises:
        ValueError: There is no training set, or not enough room for the tokens that are always kept.
    """
    tokens: torch.Tensor | None = getattr(drafter, "draft_tokens", None)
    if tokens is None:
        return
    if rows is None:
        raise ValueError("draft_vocab_size needs the training set of ShareGPTData, and there is none: leave it out")
    counts = torch.from_numpy(assistant_token_counts(rows, base.shape.vocab_size))
    special = {token for token, added in base.tokenizer.added_tokens_decoder.items() if added.special}
    kept = base.eos | {token for token in special if counts[token] > 0}
    tokens.copy_(most_frequent(counts, len(tokens), kept))
    share = counts[tokens.cpu()].sum() / counts.sum()
    rank_zero_info(
        f"draft vocabulary: {len(tokens):,} of {len(counts):,} tokens, {share:.2%} of the assistant's training text"
    )
