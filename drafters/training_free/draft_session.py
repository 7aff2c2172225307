"""What drafters need of a smaller model that writes ahead of the base."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class DraftedTokens:
    """Tokens that a draft session wrote ahead of the base.

    Args:
        tokens: The tokens; the last may be an end-of-sequence token.
        distributions: (V,) the probabilities that each token was drawn with; empty if they are argmaxes.
    """

    tokens: list[int]
    distributions: list[Tensor]


class DraftSession(Protocol):
    """A model that writes ahead of the base, with its own KV cache and its own drafter.

    `inference.verifier.draft_model` implements it.

    Args:
        forwards: Number of forward passes so far.
        remembers: Whether what it writes may depend on earlier texts.
        samples_drafts: Whether its tokens are drawn at random.
    """

    forwards: int
    remembers: bool
    samples_drafts: bool

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a new text."""

    def rewind(self, length: int) -> None:
        """Forget what lies beyond the first ``length`` tokens of the text, because they were rejected drafts."""

    def reset(self) -> None:
        """Forget what its drafter keeps across texts."""

    def write(
        self,
        seq: Sequence[int],
        num_tokens: int,
        eos: frozenset[int] = frozenset(),
        threshold: float = 0.0,
        draft_seed: int = 0,
    ) -> DraftedTokens:
        """Continue ``seq``. Tokens written earlier that are not part of it are dropped.

        Args:
            seq: The text so far; it extends the ``seq`` of the previous call.
            num_tokens: Largest number of tokens to write.
            eos: End-of-sequence tokens; writing stops after one.
            threshold: Writing stops after a token whose probability is below this.
            draft_seed: Seed of the random numbers, if tokens are sampled; see `Limits`.
        """
