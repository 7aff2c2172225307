"""Drafts of a smaller model, or of the base with sublayers skipped, alone and in a cascade with cheaper drafters."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from drafters.checks import check_at_least
from drafters.protocol import Drafter, Limits, StepResult
from drafters.training_free.corpus import CorpusTable
from drafters.training_free.ngram import PromptLookup
from drafters.tree import ChildDistribution, DraftTree


@dataclass(frozen=True)
class DraftedTokens:
    """Tokens that a draft session wrote ahead of the base."""

    tokens: list[int]  # the last may be an end-of-sequence token
    distributions: list[Tensor]  # (V,) the probabilities that each token was drawn with; empty if they are argmaxes


class DraftSession(Protocol):
    """A model that writes ahead of the base, with its own KV cache and its own drafter.

    `inference.verifier.draft_model` and `inference.verifier.layer_skipping` implement it.
    """

    forwards: int  # forward passes so far
    remembers: bool  # whether what it writes may depend on earlier texts
    samples_drafts: bool  # whether its tokens are drawn at random

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a new text."""
        return None

    def rewind(self, length: int) -> None:
        """Forget what lies beyond the first ``length`` tokens of the text, because they were rejected drafts."""
        return None

    def reset(self) -> None:
        """Forget what its drafter keeps across texts."""
        return None

    def write(
        self,
        seq: Sequence[int],
        num_tokens: int,
        eos: frozenset[int] = frozenset(),
        threshold: float = 0.0,
        draft_seed: int = 0,
    ) -> DraftedTokens:
        """Continue ``seq``, which extends that of the previous call, by up to ``num_tokens`` tokens.

        Tokens written earlier that are not part of it are dropped. Writing stops after one of ``eos`` and after a token
        whose probability is below the threshold. The seed is that of sampled tokens, see `Limits`.
        """


SCHEDULES = "constant", "heuristic"


class DraftModel(Drafter):
    """A smaller model drafts one chain of tokens (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

    Greedy drafts are accepted as long as they match the base. Sampled drafts carry the probabilities they were drawn
    with, which exact rejection sampling needs. If the session of the smaller model has a drafter of its own, this is
    the vertical cascade of CS Drafting (arXiv 2312.11462).

    The session of the smaller model is ``inner``. The other arguments are those of the command line
    (`inference.model_drafters.draft_model`).
    """

    def __init__(
        self, inner: DraftSession, num_draft: int = 5, threshold: float = 0.0, schedule: str = "constant"
    ) -> None:
        check_at_least(1, num_draft=num_draft)
        if not 0 <= threshold < 1:
            raise ValueError(f"threshold must be at least 0 and below 1, not {threshold}")
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, not {schedule!r}")
        self.inner, self.num_draft, self.threshold, self.schedule = inner, num_draft, threshold, schedule
        self.remembers, self.samples_drafts = inner.remembers or schedule == "heuristic", inner.samples_drafts
        self.draft_forwards, self._initial_num_draft = inner.forwards, num_draft

    def begin(self, prompt: Sequence[int]) -> None:
        self.inner.begin(prompt)

    def observe(self, step: StepResult) -> None:
        if self.schedule != "constant" and (drafted := step.tree.num_candidates):
            self.num_draft = self.num_draft + 2 if len(step.path) == drafted else max(1, self.num_draft - 1)

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        room = min(self.num_draft, limits.max_depth, limits.max_nodes)
        if room < 1:
            return DraftTree()
        drafted = self.inner.write(seq, room, limits.eos, self.threshold, limits.draft_seed)
        self.draft_forwards = self.inner.forwards
        drawn = (ChildDistribution(node - 1, probs, (node,)) for node, probs in enumerate(drafted.distributions))
        return replace(DraftTree.chain(drafted.tokens), distributions=tuple(drawn))

    def rewind(self, length: int) -> None:
        self.inner.rewind(length)

    def reset(self) -> None:
        self.inner.reset()
        self.num_draft = self._initial_num_draft


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
    """

    def __init__(self, inner: DraftSession, num_draft: int = 8, threshold: float = 0.8, adaptive: bool = True) -> None:
        super().__init__(inner, num_draft, threshold)
        self.adaptive = adaptive
        self._initial_threshold, self._rate = threshold, 0.0

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self.threshold, self._rate = self._initial_threshold, 0.0

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


# ---- cascades


class MaxGram(PromptLookup):
    """Max-Gram (CS Drafting, arXiv 2312.11462): prompt lookup, and bigrams of a large text where nothing matches.

    Of the table, the n-grams of a text, the most frequent token after each token is used; without one, no bigrams are.
    The authors' code looks for the longest match of any length. With 10 tokens, 98.7 % of the drafts are the same on
    Vicuna-7B's answers to the second turns of MT-Bench, and 99.9 % on the given solutions of HumanEval and GSM8K.
    """

    def __init__(self, table: CorpusTable | None = None, max_ngram: int = 10, num_draft: int = 10) -> None:
        super().__init__(max_ngram, num_draft)
        self.table = table

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        tree = super().propose(seq, limits)
        if len(tree) or self.table is None:
            return tree
        tokens = [seq[-1]]
        for _ in range(min(self.num_draft, limits.max_depth, limits.max_nodes)):
            grams = self.table.after(tokens[-1:])
            if not grams:
                break
            tokens.append(grams[0][0])
            if tokens[-1] in limits.eos:
                break
        return DraftTree.chain(tokens[1:])


class HorizontalCascade(DraftModel):
    """The draft model writes the first tokens of a chain, and a cheaper drafter the last ones (CS Drafting).

        root ── d1 ── d2 ── d3 ── m1 ── m2 ── m3        three tokens of the draft model, then those of Max-Gram

    The first tokens of a draft are accepted most often, so the better drafter writes them: up to ``num_draft``, which
    ``extension`` continues by a chain of its own.
    """

    def __init__(self, inner: DraftSession, extension: Drafter, num_draft: int = 5) -> None:
        super().__init__(inner, num_draft)
        self.extension, self.remembers = extension, inner.remembers or extension.remembers

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self.extension.begin(prompt)

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        tree = super().propose(seq, limits)
        depth = len(tree)
        if not depth or tree.tokens[-1] in limits.eos:
            return tree
        left = replace(limits, max_depth=limits.max_depth - depth, max_nodes=limits.max_nodes - depth)
        chain = self.extension.propose([*seq, *tree.tokens], left)
        self.extension.rewind(len(seq))
        return replace(DraftTree.chain([*tree.tokens, *chain.tokens]), distributions=tree.distributions)

    def rewind(self, length: int) -> None:
        super().rewind(length)
        self.extension.rewind(length)

    def reset(self) -> None:
        super().reset()
        self.extension.reset()
