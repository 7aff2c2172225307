"""Speculative decoding with a smaller draft model, which may have a drafter of its own (cascade)."""

from __future__ import annotations

from collections.abc import Sequence

from drafters.protocol import Drafter, Limits
from drafters.training_free.draft_session import DraftSession
from drafters.tree import ChildDistribution, DraftTree


class DraftModel(Drafter):
    """A smaller model drafts one chain of tokens (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

    Greedy drafts are accepted as long as they match the base. Sampled drafts carry the probabilities they were drawn
    with, which exact rejection sampling needs. If the session of the smaller model has a drafter of its own, this is
    the vertical cascade of CS Drafting (arXiv 2312.11462).

    Args:
        inner: Session of the smaller model.
        num_draft: Largest number of drafted tokens per step.
        threshold: A draft ends after a token whose probability is below this; 0 never ends a draft.
    """

    def __init__(self, inner: DraftSession, num_draft: int = 5, threshold: float = 0.0) -> None:
        if num_draft < 1 or not 0 <= threshold < 1:
            raise ValueError(f"need num_draft >= 1 and 0 <= threshold < 1, not {num_draft} and {threshold}")
        self.inner, self.num_draft, self.threshold = inner, num_draft, threshold
        self.remembers, self.samples_drafts = inner.remembers, inner.samples_drafts
        self.draft_forwards = inner.forwards

    def begin(self, prompt: Sequence[int]) -> None:
        self.inner.begin(prompt)

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        room = min(self.num_draft, limits.max_depth, limits.max_nodes)
        if room < 1:
            return DraftTree()
        drafted = self.inner.write(seq, room, limits.eos, self.threshold, limits.draft_seed)
        self.draft_forwards = self.inner.forwards
        distributions = (
            ChildDistribution(node - 1, probs, (node,)) for node, probs in enumerate(drafted.distributions)
        )
        return DraftTree(drafted.tokens, range(-1, len(drafted.tokens) - 1), distributions=tuple(distributions))

    def rewind(self, length: int) -> None:
        self.inner.rewind(length)

    def reset(self) -> None:
        self.inner.reset()
