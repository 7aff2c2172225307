"""A Markov bias: what the previous token adds to a drafter's logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Markov(nn.Module):
    """Low-rank bias B[l, v] = left[l] . right[v] on the logits, given the previous token l.

    ``right`` starts at zero, so training starts without a bias.

    Args:
        num_tokens: V, number of tokens that may come before.
        rank: Rank of B.
        num_columns: Number of symbols that are biased: V for cross-entropy, V + 1 for CTC, where the last column is the
            blank's.
    """

    def __init__(self, num_tokens: int, rank: int, num_columns: int) -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(f"the rank of a Markov bias must be at least 1, not {rank}: leave the bias out for none")
        self.left = nn.Parameter(torch.randn(num_tokens, rank) * 0.02)
        self.right = nn.Parameter(torch.zeros(num_columns, rank))

    def forward(self, tokens: Tensor) -> Tensor:
        """The rows of B for tokens (...): (..., columns), in float32 at least.

        In bfloat16 a row would depend on which other rows are in its batch.
        """
        dtype = torch.promote_types(self.left.dtype, torch.float32)
        return nn.functional.embedding(tokens, self.left).to(dtype) @ self.right.to(dtype).T
