"""Self-speculative decoding: the base drafts for itself with some of its sublayers skipped."""

from __future__ import annotations

from collections.abc import Sequence

from drafters.protocol import StepResult
from drafters.training_free.draft_model import DraftModel
from drafters.training_free.draft_session import DraftSession

# How the threshold follows the acceptance rate (Draft & Verify, adaptive draft-exiting mechanism; values of its code).
RATE_DECAY = 0.5
TARGET_RATE = 0.9
STEP = 0.01
THRESHOLD_DECAY = 0.9


class SelfSpeculative(DraftModel):
    """The base with some sublayers skipped drafts one chain of tokens (Draft & Verify, arXiv 2309.08168).

    A draft ends after a token whose probability is below a threshold. The threshold adapts to the running acceptance
    rate: below the target rate drafts end earlier, above it later. Nothing is drafted for the prefill, because there is
    no KV cache yet.

    Args:
        inner: Session of the base with sublayers skipped.
        num_draft: Largest number of drafted tokens per step.
        threshold: A draft ends after a token whose probability is below this; 0 never ends a draft.
        adaptive: Whether the threshold follows the acceptance rate.
        carry: Whether the threshold and the rate are kept from one text to the next, as in the authors' notebooks.
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
        self._initial_threshold, self._rate = threshold, 0.0

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        if not self.carry:
            self._restart()

    def observe(self, step: StepResult) -> None:
        drafted = step.tree.num_candidates
        if not self.adaptive or not drafted:
            return
        accepted = len(step.path)
        if accepted < drafted and step.emitted[-1] == step.tree.tokens[accepted]:  # an accepted end-of-sequence token
            accepted += 1
        self._rate = RATE_DECAY * self._rate + (1 - RATE_DECAY) * accepted / drafted
        if self._rate < TARGET_RATE:
            target = self.threshold + STEP
        else:
            target = self.threshold - (STEP if drafted < self.num_draft else 0.0)
        self.threshold = THRESHOLD_DECAY * self.threshold + (1 - THRESHOLD_DECAY) * target

    def reset(self) -> None:
        super().reset()
        self._restart()

    def _restart(self) -> None:
        self.threshold, self._rate = self._initial_threshold, 0.0
