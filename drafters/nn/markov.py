"""A Markov bias: what the previous token adds to a drafter's logits."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.protocol import BaseShape, BaseWeights

FOLDED_ROWS = 4096  # of the embedding, widened at once while the left factor is folded


class Markov(nn.Module):
    """Low-rank bias B[l, v] = left[l] . right[v] on the logits, given the previous token l.

    ``right`` starts at zero, so training starts without a bias. Any of ``num_tokens`` may come before. The symbols that
    are biased are all V tokens or the V' of a draft vocabulary, and for CTC the blank, which is the last column.
    """

    def __init__(self, num_tokens: int, rank: int, num_columns: int) -> None:
        super().__init__()
        self.rank = rank
        self.left = nn.Parameter(torch.randn(num_tokens, rank) * 0.02)
        self.right = nn.Parameter(torch.zeros(num_columns, rank))

    def factors(self, tokens: Tensor, base_weights: BaseWeights | None = None) -> tuple[Tensor, Tensor]:
        """The left factors (..., R) of the previous tokens (...), and the right factors (columns, R)."""
        return F.embedding(tokens, self.left), self.right

    def folded(self, base_weights: BaseWeights | None = None) -> Markov:
        """The same bias as two tables, in which decoding adds it: this one, or a copy in float32 at least."""
        dtype = torch.promote_types(self.left.dtype, torch.float32)
        if self.left.dtype == dtype:
            return self
        return _tables(self.left.to(dtype), self.right.to(dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        """The rows of B for tokens (...): (..., columns), in float32 at least.

        In bfloat16 a row would depend on which other rows are in its batch.
        """
        dtype = torch.promote_types(self.left.dtype, torch.float32)
        return F.embedding(tokens, self.left).to(dtype) @ self.right.to(dtype).T


class BaseMarkov(nn.Module):
    """The bias of `Markov` with factors that are linear maps of the base's own weights.

    left[l] = W_1 rmsnorm(E[l]) and right[v] = W_2 H[v], where E is the base's embedding and H its LM head. Tokens that
    the base treats alike thus share what is learned about them. The blank is no token of the base and has a row of its
    own, which is then the last column of B. ``right`` starts at zero, so training starts without a bias.
    """

    linear_maps = "left", "right"  # Muon trains them as it does the weights of linear layers

    def __init__(self, base: BaseShape, rank: int, has_blank: bool) -> None:
        super().__init__()
        self.rank, self.norm_eps = rank, base.norm_eps
        self.left = nn.Parameter(torch.randn(rank, base.hidden_size) * base.hidden_size**-0.5)
        self.right = nn.Parameter(torch.zeros(rank, base.hidden_size))
        self.blank = nn.Parameter(torch.zeros(1, rank)) if has_blank else None

    def factors(self, tokens: Tensor, base_weights: BaseWeights) -> tuple[Tensor, Tensor]:
        """The left factors (..., R) of the previous tokens (...), and the right factors (columns, R).

        The LM head is multiplied in its own dtype, as for the logits; the results are float32 at least.
        """
        dtype = torch.promote_types(self.left.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            head = base_weights.head.detach()
            right = (head @ self.right.to(head.dtype).T).to(dtype)
            right = right if self.blank is None else torch.cat([right, self.blank.to(dtype)])
            return self._left(base_weights.embedding.detach()[tokens]), right

    def _left(self, embedded: Tensor) -> Tensor:
        dtype = torch.promote_types(self.left.dtype, torch.float32)
        return F.rms_norm(embedded.to(dtype), embedded.shape[-1:], eps=self.norm_eps) @ self.left.to(dtype).T

    @torch.no_grad()
    def folded(self, base_weights: BaseWeights) -> Markov:
        """The same bias as two tables over the vocabulary, in float32 at least."""
        _, right = self.factors(base_weights.embedding.new_zeros(0, dtype=torch.long), base_weights)
        left = torch.cat([self._left(rows) for rows in base_weights.embedding.split(FOLDED_ROWS)])
        return _tables(left, right)


def markov_bias(
    base: BaseShape, rank: int, factors: Literal["own", "base"], has_blank: bool, num_drafted: int
) -> Markov | BaseMarkov | None:
    """The bias that a recipe asks for; None for rank 0.

    Any token may come before. Those that follow are the ``num_drafted`` that can be drafted.
    """
    if not rank:
        return None
    if factors == "base":
        return BaseMarkov(base, rank, has_blank)
    return Markov(base.vocab_size, rank, num_drafted + has_blank)


def _tables(left: Tensor, right: Tensor) -> Markov:
    """A bias with these tables."""
    with torch.device("meta"):  # the weights follow
        tables = Markov(len(left), left.shape[1], len(right))
    tables.left, tables.right = (nn.Parameter(table.detach(), requires_grad=False) for table in (left, right))
    return tables
