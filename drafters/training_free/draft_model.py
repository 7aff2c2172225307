"""Speculation with a smaller model, alone (draft model) or drafted for in its turn (cascade)."""

from __future__ import annotations

from collections.abc import Sequence

from drafters.protocol import Drafter, DraftSession, Limits
from drafters.tree import ChildDistribution, DraftTree


class DraftModel(Drafter):
    """A smaller model writes the draft, one chain (Leviathan et al. 2211.17192; Chen et al. 2302.01318).

    Greedy drafts are matched; drawn ones carry the law they were drawn from, for exact rejection. With an inner
    session that has a drafter of its own this is vertical cascade drafting (CS Drafting, arXiv 2312.11462).

    Args:
        inner: Session of the smaller model.
        num_draft: Tokens a draft.
        threshold: A draft ends after a token that is less probable than this; 0 never.
    """

    def __init__(self, inner: DraftSession, num_draft: int = 5, threshold: float = 0.0) -> None:
        if num_draft < 1 or not 0 <= threshold < 1:
            raise ValueError(f"need num_draft >= 1 and 0 <= threshold < 1, not {num_draft} and {threshold}")
        self.inner, self.num_draft, self.threshold = inner, num_draft, threshold
        self.remembers = inner.remembers

    @property
    def draft_forwards(self) -> int:
        return self.inner.forwards

    def begin(self, prompt: Sequence[int]) -> None:
        self.inner.begin(prompt)

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        room = min(self.num_draft, limits.max_depth, limits.max_nodes)
        if room < 1:
            return DraftTree()
        written = self.inner.write(seq, room, limits.eos, self.threshold)
        distributions = (
            ChildDistribution(node - 1, probs, (node,)) for node, probs in enumerate(written.distributions)
        )
        return DraftTree(written.tokens, range(-1, len(written.tokens) - 1), distributions=tuple(distributions))

    def rewind(self, length: int) -> None:
        self.inner.rewind(length)

    def reset(self) -> None:
        self.inner.reset()
