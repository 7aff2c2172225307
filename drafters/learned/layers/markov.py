"""A Markov bias: what a drafter's law of the next token adds for the token before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Markov(nn.Module):
    """Low-rank bias B[l, v] = left[l] . right[v] on the logits, given the last token l.

    ``right`` starts at zero, so that training starts without a bias.

    Args:
        num_tokens: V, tokens that may come before.
        rank: Of B.
        num_columns: Symbols the bias is about: V for cross-entropy, V + 1 for CTC, whose last column is the blank.
    """

    def __init__(self, num_tokens: int, rank: int, num_columns: int) -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(f"the rank of a Markov bias must be at least 1, not {rank}: leave the bias out for none")
        self.left = nn.Parameter(torch.randn(num_tokens, rank) * 0.02)
        self.right = nn.Parameter(torch.zeros(num_columns, rank))

    def forward(self, tokens: Tensor) -> Tensor:
        """B of tokens (...): (..., columns), at least float32: in less, a row would hang on the others of its batch."""
        work = torch.promote_types(self.left.dtype, torch.float32)
        return nn.functional.embedding(tokens, self.left).to(work) @ self.right.to(work).T
