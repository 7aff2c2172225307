"""The draft vocabulary: the tokens that a drafter can draft, if they are only a part of the base's vocabulary."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from drafters.checks import check_at_least
from drafters.protocol import BaseWeights


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """V' of the base's V tokens. A drafter's logits have a column for each of them; token ids are always the base's."""

    tokens: Tensor  # (V',) the token that each column stands for, distinct
    vocab_size: int  # V

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def columns(self) -> Tensor:
        """(V,) the column of each token of the base; V' if it cannot be drafted."""
        columns = torch.full((self.vocab_size,), len(self), device=self.tokens.device)
        return columns.index_copy_(0, self.tokens, torch.arange(len(self), device=self.tokens.device))

    def can_draft(self, tokens: Tensor) -> Tensor:
        """Whether each of the tokens (...) can be drafted."""
        return self.columns[tokens] < len(self)

    def cut(self, labels: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """The columns of labels (..., U), and which of the valid ones (..., U) come before any that cannot be drafted.

        No draft gets past that one.
        """
        can_draft = self.can_draft(labels)
        return torch.where(can_draft, self.columns[labels], 0), valid & can_draft.int().cumprod(-1).bool()

    def spread(self, values: Tensor, fill: float) -> Tensor:
        """Values (..., V' + e) of the columns as values (..., V + e) of the base's tokens; the others get ``fill``.

        The last e columns, such as the blank's, are kept.
        """
        whole = values.new_full((*values.shape[:-1], self.vocab_size), fill)
        whole = whole.index_copy_(-1, self.tokens, values[..., : len(self)])
        return torch.cat([whole, values[..., len(self) :]], -1)


def add_draft_tokens(drafter: nn.Module, draft_vocab_size: int | None, vocab_size: int) -> int:
    """Register the buffer ``draft_tokens`` of a drafter: (V',) token ids, or None if it can draft every token.

    A new drafter can draft the tokens with the smallest ids, until training chooses or loading reads others. A
    ``draft_vocab_size`` V' of None or 0 is the whole vocabulary, and so is one that is larger. Returns how many tokens
    can be drafted.
    """
    draft_vocab_size = min(draft_vocab_size or 0, vocab_size)
    check_at_least(0, draft_vocab_size=draft_vocab_size)
    drafter.register_buffer("draft_tokens", torch.arange(draft_vocab_size) if draft_vocab_size else None)
    drafter.register_load_state_dict_pre_hook(_check_draft_tokens)
    return draft_vocab_size or vocab_size


def _check_draft_tokens(drafter: Any, weights: dict[str, Tensor], prefix: str, *_: object) -> None:
    tokens = weights.get(f"{prefix}draft_tokens")
    if tokens is None or not tokens.numel():
        return
    if tokens.ndim != 1 or tokens.dtype not in (torch.int32, torch.int64):
        raise RuntimeError("draft_tokens is not a list of token ids")
    if tokens.min() < 0 or tokens.max() >= drafter.vocab_size or len(tokens.unique()) < len(tokens):
        raise RuntimeError(f"draft_tokens names tokens twice, or tokens outside the vocabulary of {drafter.vocab_size}")


def restricted(base_weights: BaseWeights, draft_tokens: Tensor | None) -> tuple[BaseWeights, DraftVocabulary | None]:
    """The base's embedding with a copy of the LM head's rows (V', D) for the draft vocabulary, and this vocabulary.

    Without a draft vocabulary the weights are returned as they are, and None.
    """
    if draft_tokens is None:
        return base_weights, None
    rows = base_weights.head.detach()[draft_tokens]
    packed = base_weights.packed_head and base_weights.packed_head.rows(draft_tokens)
    return BaseWeights(base_weights.embedding, rows, packed), DraftVocabulary(draft_tokens, len(base_weights.head))


def most_frequent(counts: Tensor, num_tokens: int, kept: Collection[int] = ()) -> Tensor:
    """The V' tokens of a draft vocabulary, ascending: those that must be kept and the most frequent others.

    >>> most_frequent(torch.tensor([5, 0, 9, 9, 1]), num_tokens=3, kept=[4])
    tensor([2, 3, 4])

    ``counts`` (V,) says how often each token occurs; of equally frequent ones the smaller id comes first. Raises
    ValueError if more tokens must be kept than there is room for.
    """
    if len(kept := set(kept)) > num_tokens:
        raise ValueError(
            f"draft_vocab_size ({num_tokens}) is less than the {len(kept)} end-of-sequence and template tokens that "
            "are always kept: raise it"
        )
    is_kept = torch.zeros_like(counts, dtype=torch.bool)
    is_kept[list(kept)] = True
    ranked = torch.where(is_kept, counts.max() + 1, counts).argsort(descending=True, stable=True)
    return ranked[:num_tokens].sort().values
