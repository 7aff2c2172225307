"""Chains of drafters that propose trees, for engines that verify a single path."""

from __future__ import annotations

from collections.abc import Sequence

from drafters.protocol import Drafter, Limits, StepResult
from drafters.tree import DraftTree


class ChainDrafter(Drafter):
    """Proposes the first path of another drafter's tree; see `DraftTree.first_path`.

    Args:
        drafter: The drafter.
        num_tokens: Largest number of tokens of a chain.
    """

    def __init__(self, drafter: Drafter, num_tokens: int) -> None:
        self.drafter, self.num_tokens = drafter, num_tokens
        self.required_outputs = drafter.required_outputs
        self.remembers = drafter.remembers

    def begin(self, prompt: Sequence[int]) -> None:
        self.drafter.begin(prompt)

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        tokens = self.drafter.propose(seq, limits).first_path(min(self.num_tokens, limits.max_depth, limits.max_nodes))
        return DraftTree(tokens, range(-1, len(tokens) - 1))

    def observe(self, step: StepResult) -> None:
        self.drafter.observe(step)

    def rewind(self, length: int) -> None:
        self.drafter.rewind(length)

    def reset(self) -> None:
        self.drafter.reset()
