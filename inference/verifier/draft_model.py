"""A session of a smaller model that drafts for the base; the drafters that use one hold it."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import torch
from torch import Tensor

from drafters.checks import check_at_least
from drafters.protocol import Drafter, NoDrafter
from drafters.training_free.draft_model import DraftedTokens, DraftSession
from drafters.tree import DraftTree, common_prefix
from inference.verifier.base import Base
from inference.verifier.runner import ForwardOutput, Runner
from inference.verifier.sampling import KeyedSampler, Sampler, TreeLogits, most_probable
from inference.verifier.session import Session


class DraftRunner(Runner):
    """A runner of a draft model whose vocabulary is padded to another size than the base's, which its logits have.

    Tokens that only the draft model has are cut off, so a distribution is one over the others. Tokens that only the
    base has get probability 0, and the draft model reads its own last token in their place.
    """

    def __init__(self, base: Base, vocab_size: int) -> None:
        super().__init__(base)
        self.last_token, self.vocab_size = self.vocab_size - 1, vocab_size

    def _forward(self, pending: Sequence[int], tree: DraftTree, layers: Sequence[int]) -> ForwardOutput:
        pending, nodes = ([min(token, self.last_token) for token in tokens] for tokens in (pending, tree.tokens))
        output = super()._forward(pending, replace(tree, tokens=nodes), layers)
        num_missing = self.vocab_size - output.logits.shape[1]  # below 0, the last ones are cut off
        return replace(output, logits=torch.nn.functional.pad(output.logits, (0, num_missing), value=-inf))


class Lenient(Sampler):
    """Greedy decoding of a draft model that keeps any token of a chain if it gives it more than 1 / leniency.

    This is CS Drafting's rule for what Max-Gram drafts. For an inner model's token it divides that model's probability
    of the token instead of 1. The base verifies the draft as ever.
    """

    def __init__(self, leniency: float) -> None:
        super().__init__()
        check_at_least(1, leniency=leniency)
        self.leniency = leniency

    def decide(self, rows: TreeLogits) -> Tensor:
        picks = most_probable(rows.logits)
        drafted = picks.new_tensor(rows.tree.tokens)
        probabilities = rows.logits[:-1].float().softmax(-1).gather(1, drafted[:, None])[:, 0]
        picks[:-1] = torch.where(probabilities > 1 / self.leniency, drafted, picks[:-1])
        return picks[:, None]


class DraftModelSession(DraftSession):
    """A session of a draft model that lasts over the base's steps.

    The cache holds what the draft model wrote. If the base rejects some of it, only the rejected part is dropped. The
    drafter, if there is one, drafts for the draft model in turn. The seed of the sampler selects other samples for the
    same request; without a sampler, decoding is greedy.
    """

    def __init__(self, runner: Runner, drafter: Drafter | None = None, sampler: Sampler | None = None) -> None:
        self.session = Session(runner, drafter or NoDrafter(), sampler)
        self.sampler = sampler
        self.forwards = 0
        self.remembers, self.samples_drafts = self.session.drafter.remembers, isinstance(sampler, KeyedSampler)
        self._num_shared = 0  # leading tokens of the session's text that are known to be the base's text too

    def begin(self, prompt: Sequence[int]) -> None:
        self.session.begin(prompt)
        self._num_shared = len(prompt)

    def rewind(self, length: int) -> None:
        """Trust only the first ``length`` tokens of the text: the others were a draft themselves, and were rejected."""
        self._num_shared = min(self._num_shared, length)

    def reset(self) -> None:
        """Reset the draft model's own drafter."""
        self.session.drafter.reset()

    @torch.inference_mode()
    def write(
        self,
        seq: Sequence[int],
        num_tokens: int,
        eos: frozenset[int] = frozenset(),
        threshold: float = 0.0,
        draft_seed: int = 0,
    ) -> DraftedTokens:
        session = self.session
        sampler = self.sampler.for_proposal(draft_seed) if isinstance(self.sampler, KeyedSampler) else None
        session.sampler = sampler or session.sampler
        # The base's text only grows between two calls, unless `rewind` says otherwise. So the comparison starts behind
        # what was the same at the last call, and a step costs the same however long the text is.
        session.resume(seq, common_prefix(session.seq, seq, self._num_shared))
        self._num_shared = len(seq)
        draft, forwards_before = DraftedTokens([], []), session.drafter.draft_forwards
        for emitted, _ in session.steps(min(len(seq) + num_tokens, session.runner.context_length), eos):
            self.forwards += 1
            improbable = self._improbable(emitted, threshold) if threshold else []
            emitted = emitted[: 1 + improbable[0]] if improbable else emitted
            draft.tokens.extend(emitted)
            if sampler:
                draft.distributions.extend(sampler.probabilities(session.last.emitted_logits()[: len(emitted)]))
            if improbable:
                break
        self.forwards += session.drafter.draft_forwards - forwards_before
        return draft

    def _improbable(self, emitted: list[int], threshold: float) -> list[int]:
        """Indices of the last step's tokens whose probability is below the threshold."""
        logits = self.session.last.emitted_logits()
        tokens = torch.tensor(emitted, device=logits.device)[:, None]
        is_improbable = logits.float().softmax(-1).gather(1, tokens)[:, 0] < threshold
        return [index for index, improbable in enumerate(is_improbable.tolist()) if improbable]
