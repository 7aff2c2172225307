"""Self-speculative decoding: the base drafts for itself, with some of its sublayers left out."""

from __future__ import annotations

from collections.abc import Sequence

from drafters.protocol import DraftSession, StepResult
from drafters.training_free.draft_model import DraftModel

# How the threshold follows the acceptance rate (Draft & Verify, adaptive draft exiting; the numbers of its code).
RATE_DECAY = 0.5
WANTED_RATE = 0.9
STEP = 0.01
THRESHOLD_DECAY = 0.9


class SelfSpeculative(DraftModel):
    """The base without some sublayers writes the draft, one chain (Draft & Verify, arXiv 2309.08168).

    A draft ends after a token that the drafting base doubts. How much doubt that takes follows the running acceptance
    rate: below the wanted rate drafts end sooner, above it later. Nothing is drafted for the prefill, where there is
    no cache yet to draft on.

    Args:
        inner: Session of the base with sublayers left out.
        num_draft: Tokens a draft at most.
        threshold: A draft ends after a token that is less probable than this; 0 never.
        adaptive: Whether the threshold follows the acceptance rate.
        carry: Whether the threshold and the rate go on from one text to the next, as in the authors' notebooks.
    """

    def __init__(
        self,
        inner: DraftSession,
        num_draft: int = 8,
        threshold: float = 0.8,
        adaptive: bool = True,
        carry: bool = False,
    ) -> None:
        super().__init__(inner, num_draft, threshold)
        self.adaptive, self.carry = adaptive, carry
        self.remembers = carry or inner.remembers
        self._first, self._rate = threshold, 0.0

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        if not self.carry:
            self._restart()

    def observe(self, step: StepResult) -> None:
        drafted = step.tree.num_candidates
        if not self.adaptive or not drafted:
            return
        accepted = len(step.path)
        if accepted < drafted and step.emitted[-1] == step.tree.tokens[accepted]:  # an end token, drafted and accepted
            accepted += 1
        self._rate = RATE_DECAY * self._rate + (1 - RATE_DECAY) * accepted / drafted
        if self._rate < WANTED_RATE:
            wanted = self.threshold + STEP
        else:
            wanted = self.threshold - (STEP if drafted < self.num_draft else 0.0)
        self.threshold = THRESHOLD_DECAY * self.threshold + (1 - THRESHOLD_DECAY) * wanted

    def reset(self) -> None:
        super().reset()
        self._restart()

    def _restart(self) -> None:
        self.threshold, self._rate = self._first, 0.0
