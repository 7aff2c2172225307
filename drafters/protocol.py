"""What the decoding loop asks of a drafter, and what it tells it after each step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from drafters.tree import DraftTree


@dataclass(frozen=True)
class BaseShape:
    """The numbers of a base that a learned drafter is built from.

    Args:
        hidden_size: Width D of the base's hidden states.
        vocab_size: Vocabulary V.
        num_layers: Decoder layers of the base.
        num_heads: Attention heads.
        head_dim: Width of one head.
        intermediate_size: Width of the feed-forward layer.
        rope_theta: Base of the rotary position embedding.
        norm_eps: Epsilon of the RMS norms.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6


@dataclass(frozen=True)
class BaseWeights:
    """The frozen tensors of the base that a learned drafter uses and never owns: both (V, D)."""

    embedding: Tensor
    head: Tensor


@dataclass(frozen=True)
class RequiredOutputs:
    """What a drafter wants to see of the base at fed positions.

    Args:
        hidden_layers: Base layers whose output is handed over; 0 is the embedding, -1 the normed last state.
        top_k: How many of the base's most probable tokens at the root and at every node, best first; 1 is its argmax.
    """

    hidden_layers: tuple[int, ...] = ()
    top_k: int = 0


@dataclass(frozen=True)
class Limits:
    """What a proposal may not exceed.

    What exceeds it is pruned. A drafter that looks at the rows of its own nodes keeps to it by itself, so that
    ``step.tree`` is the very tree it proposed.

    Args:
        max_depth: Deepest candidate; deeper ones could never be emitted.
        max_nodes: Most nodes the caller will feed.
        eos: Tokens that end the text; no candidate stands below them.
        max_scratch_depth: Deepest scratch node; deeper ones stand beyond the base's context.
    """

    max_depth: int
    max_nodes: int = 1024
    eos: frozenset[int] = frozenset()
    max_scratch_depth: int = 1024


UNLIMITED = Limits(max_depth=1024)


def at_least_one(count: Tensor) -> Tensor:
    """A count that a sum can be divided by."""
    return count.clamp(min=1)


@dataclass(frozen=True)
class TrainingBatch:
    """Texts, and what the frozen base says about them.

    Args:
        hidden: (B, S, F * D) hidden states of the layers the drafter needs.
        last: (B, S, D) the normed last state, which the head reads: the base's law of the next token.
        input_ids: (B, S).
        labels: (B, S) the base's own next token at each position.
        loss_mask: (B, S) bool, true on assistant tokens.
        step: Optimizer steps taken before this batch: what fades in or out in a loss goes by it, so that a resumed run
            and one that accumulates gradients do the same.
        divisor: Of a count, what a loss divides the sum over so many terms by; with several processes the mean of
            their counts, so that the mean of their losses is that over all terms. All processes call it equally often.
    """

    hidden: Tensor
    last: Tensor
    input_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    step: int = 0
    divisor: Callable[[Tensor], Tensor] = at_least_one

    def with_divisor(self, divisor: Callable[[Tensor], Tensor]) -> TrainingBatch:
        """The same batch with another divisor."""
        other = copy(self)
        object.__setattr__(other, "divisor", divisor)  # the class is frozen
        return other


@dataclass(frozen=True)
class StepResult:
    """What one step showed and decided.

    Args:
        num_pending: P, decided tokens that were fed; the last of them is the root.
        tree: The draft tree as fed, M nodes.
        hidden: (P + M, F * D) hidden states of the layers the drafter needs, or None.
        path: Accepted nodes, from the root down.
        emitted: Tokens the text gained: the accepted path and the bonus token, after cuts.
        top: 1 + M rows of the base's most probable tokens, as many as the drafter needs; row 0 is the root's, row
            1 + i that of node i. Without effect on what is emitted, so sampling shows them too.
    """

    num_pending: int
    tree: DraftTree
    hidden: Tensor | None
    path: list[int]
    emitted: list[int]
    top: Sequence[Sequence[int]] = ()

    def committed_hidden(self) -> Tensor:
        """Hidden states of the positions this step added to the base's cache: (P + len(path), F * D)."""
        assert self.hidden is not None, "the drafter asked for no hidden states"
        if not self.path:
            return self.hidden[: self.num_pending]
        rows = [*range(self.num_pending), *(self.num_pending + node for node in self.path)]
        return self.hidden[torch.tensor(rows, device=self.hidden.device)]


class Drafter(Protocol):
    """What proposes. One text at a time: ``begin``, then ``propose`` and ``observe`` in turn.

    Args:
        needs: What it wants to see of the base.
        history_only: Whether proposals depend on nothing but the tokens of the texts so far; such a drafter can be
            replayed on recorded answers.
        remembers: Whether proposals may depend on texts decoded before, since the last `reset`.
        draft_forwards: Forwards of a draft module or model made so far.
    """

    required_outputs: RequiredOutputs = RequiredOutputs()
    history_only: bool = False
    remembers: bool = True
    draft_forwards: int = 0

    def begin(self, prompt: Sequence[int]) -> None:
        """Forget the last text and look at the prompt of the next; what a drafter keeps across texts stays."""

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        """Guess what follows ``seq``, whose last token is the root. No base forward happens inside."""

    def observe(self, step: StepResult) -> None:
        """Learn from what the step showed."""

    def rewind(self, length: int) -> None:
        """Forget what lies beyond the first ``length`` tokens of the text: they were a draft, and rejected.

        The last token that stays is a root again: what was observed at its position is handed over once more.
        """

    def reset(self) -> None:
        """Forget everything, what is kept across texts too."""


class NoDrafter(Drafter):
    """Proposes nothing: the base alone, one token a step (vanilla decoding)."""

    history_only = True
    remembers = False

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        return DraftTree()


@dataclass(frozen=True)
class DraftedTokens:
    """What an inner session wrote ahead.

    Args:
        tokens: At most as many as asked for; the last may end the text.
        laws: (V,) the law of each token, where they were drawn; empty where they are argmaxes.
    """

    tokens: list[int]
    distributions: list[Tensor]


class DraftSession(Protocol):
    """A model that writes ahead of the base, with its own cache and its own drafter; `inference.engine.draft_session`
    makes them.

    Args:
        forwards: Forwards made so far.
        remembers: Whether what it writes may depend on texts before this one.
    """

    forwards: int
    remembers: bool

    def begin(self, prompt: Sequence[int]) -> None:
        """Forget the last text."""

    def rewind(self, length: int) -> None:
        """Forget what lies beyond the first ``length`` tokens of the text: they were a draft, and rejected."""

    def reset(self) -> None:
        """Forget what its drafter keeps across texts."""

    def write(
        self, seq: Sequence[int], num_tokens: int, eos: frozenset[int] = frozenset(), threshold: float = 0.0
    ) -> DraftedTokens:
        """Go on from ``seq``. What was written before and is not in it is taken back.

        Args:
            seq: The text so far; it begins with what ``seq`` was at the call before.
            num_tokens: Tokens at most.
            eos: Writing stops after one of these.
            threshold: Writing stops after a token that is less probable than this.
        """


class LearnedDrafter(nn.Module, ABC):
    """A drafter with weights, trained by ``train.DrafterTraining`` on a frozen base.

    A subclass takes a `BaseShape` first and flat, typed arguments after it; those arguments are the recipe that
    the YAML, the checkpoint and the exported folder share. ``decoding`` names those that decoding reads and may set
    anew; training fixes the others. Besides `Drafter`'s three methods it has:
    """

    decoding: ClassVar[frozenset[str]] = frozenset()
    required_outputs: RequiredOutputs
    history_only = False
    remembers = False
    draft_forwards = 0
    base_weights: BaseWeights | None = None

    def attach_base_weights(self, base_weights: BaseWeights) -> None:
        """Take the base's embedding and head for drafting; they stay outside ``state_dict``."""
        self.__dict__["base_weights"] = base_weights

    @abstractmethod
    def rewind(self, length: int) -> None:
        """As `Drafter.rewind`: observed positions from ``length - 1`` on are forgotten."""

    def reset(self) -> None:
        """Nothing is kept across texts."""

    def initialise(self, base_weights: BaseWeights) -> None:
        """Start weights that begin as copies of the base's; called once, before training and before any checkpoint."""

    @abstractmethod
    def loss(self, batch: TrainingBatch, base_weights: BaseWeights) -> tuple[Tensor, dict[str, Tensor]]:
        """Training loss of a batch, a scalar, and scalars worth logging."""

    @abstractmethod
    def draft_at(
        self, hidden: Tensor, input_ids: Tensor, anchors: Tensor, base_weights: BaseWeights, limits: Limits = UNLIMITED
    ) -> list[DraftTree]:
        """The trees that decoding would propose at several anchors of one known text.

        Args:
            hidden: (S, F * D). input_ids: (S,). anchors: (A,) positions of the roots.
            borrowed: The base's embedding and head.
            limits: Of every proposal.
        """
