"""A session of a smaller model that writes ahead of the base, for the drafters that hold one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.protocol import DraftedTokens, Drafter, NoDrafter
from inference.engine.runner import Runner
from inference.engine.sampling import KeyedSampler, RunningSampler, Sampler
from inference.engine.session import Session


class DraftModelSession:
    """A persistent session of a draft model; implements `drafters.protocol.DraftSession`.

    Its cache holds what it wrote: where the base refuses a part, only that part is forgotten.

    Args:
        runner: The draft model and its cache.
        drafter: What proposes to the draft model in turn.
        sampler: How the draft model picks tokens; greedily unless said otherwise.
    """

    def __init__(self, runner: Runner, drafter: Drafter | None = None, sampler: Sampler | None = None) -> None:
        self.session = Session(runner, drafter or NoDrafter(), sampler)
        self.forwards = 0
        self.remembers = self.session.drafter.remembers or isinstance(sampler, RunningSampler)
        self._known = 0

    def begin(self, prompt: Sequence[int]) -> None:
        self.session.begin(prompt)
        self._known = len(prompt)

    def rewind(self, length: int) -> None:
        """The text that was asked about is good only up to ``length`` tokens: it was a draft itself, and refused."""
        self._known = min(self._known, length)

    def reset(self) -> None:
        """Forget what the model's own drafter keeps across texts, and begin its draws anew."""
        self.session.drafter.reset()
        if isinstance(self.session.sampler, RunningSampler):
            self.session.sampler.reset()

    def write(
        self, seq: Sequence[int], num_tokens: int, eos: frozenset[int] = frozenset(), threshold: float = 0.0
    ) -> DraftedTokens:
        session = self.session
        self._go_back_to(seq)
        end = min(len(seq) + num_tokens, session.runner.context_length)
        tokens: list[int] = []
        distributions: list[Tensor] = []
        before = session.drafter.draft_forwards
        while len(session.seq) < end:
            emitted, _ = session.step(end, eos)
            self.forwards += 1
            doubtful = self._doubtful(emitted, threshold) if threshold else []
            emitted = emitted[: 1 + doubtful[0]] if doubtful else emitted
            tokens += emitted
            if isinstance(session.sampler, KeyedSampler):
                distributions += self._distributions(len(emitted))
            if doubtful or emitted[-1] in eos:
                break
        self.forwards += session.drafter.draft_forwards - before
        return DraftedTokens(tokens, distributions)

    def _go_back_to(self, seq: Sequence[int]) -> None:
        """Make the session's text ``seq``, keeping of the cache what both begin with.

        The first ``_known`` tokens of both are the same; comparing starts there, so that a step costs the same however
        long the text is.
        """
        session, runner = self.session, self.session.runner
        mine, same = session.seq, self._known
        while same < min(len(mine), len(seq)) and mine[same] == seq[same]:
            same += 1
        runner.truncate(min(runner.cached, same - 1))  # the last token both share is a root again
        if same < len(mine):
            session.drafter.rewind(same)
            del mine[same:]
        mine += seq[same:]
        self._known = len(seq)

    def _logits(self, count: int) -> Tensor:
        """What decided each of the last step's first ``count`` tokens: (count, V)."""
        rows = [0, *(1 + node for node in self.session.path)][:count]
        return self.session.rows.logits[rows]

    @torch.inference_mode()
    def _distributions(self, count: int) -> list[Tensor]:
        return list(self.session.sampler.probabilities(self._logits(count)))

    @torch.inference_mode()
    def _doubtful(self, emitted: list[int], threshold: float) -> list[int]:
        """Which of the last step's tokens are less probable than the threshold."""
        probabilities = self._logits(len(emitted)).float().softmax(-1)[range(len(emitted)), emitted]
        return (probabilities < threshold).nonzero()[:, 0].tolist()
