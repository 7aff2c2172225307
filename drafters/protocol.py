"""The interface between the decoding loop, the training loop and the drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

import torch
from torch import Tensor, nn

from drafters.tree import DraftTree


@dataclass(frozen=True)
class BaseShape:
    """Dimensions of a base, from which a learned drafter is built.

    Args:
        hidden_size: Width D of the base's hidden states.
        vocab_size: Vocabulary V.
        num_layers: Decoder layers of the base.
        num_heads: Attention heads.
        head_dim: Width of one head.
        intermediate_size: Width of the feed-forward layer.
        rope_theta: Base of the rotary position embedding.
        norm_eps: Epsilon of the RMS norms.
        rope_factor: Factor of Llama 3's scaling of low frequencies, which only imported drafters have; 1 for none.
        rope_low_frequency: Turns within the original length up to which a frequency is scaled in full.
        rope_high_frequency: Turns from which on a frequency is not scaled.
        rope_original_length: Context length before the scaling.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    rope_factor: float = 1.0
    rope_low_frequency: float = 1.0
    rope_high_frequency: float = 4.0
    rope_original_length: int = 8192

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (isinstance(value, int | float) and 0 < value < inf):
                raise ValueError(f"{name} of the base is {value!r}, not a positive number")


@dataclass(frozen=True)
class BaseWeights:
    """Frozen weights of the base that a learned drafter uses but does not own.

    Args:
        embedding: (V, D) the token embedding.
        head: (V, D) the LM head.
        packed_head: Multiplies a few states (..., D) with a packed copy of the LM head, without a gradient; None for
            the plain product.
    """

    embedding: Tensor
    head: Tensor
    packed_head: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class RequiredOutputs:
    """What a drafter needs from the base's forward pass, at every position that is fed.

    Args:
        hidden_layers: Base layers whose hidden states are needed; 0 is the embedding, -1 the normed last hidden state.
        top_k: Number of the base's most probable tokens needed at the root and at every node; 1 is the argmax.
    """

    hidden_layers: tuple[int, ...] = ()
    top_k: int = 0


@dataclass(frozen=True)
class Limits:
    """Limits of one proposal. Nodes beyond them are pruned.

    A drafter that reads the base's outputs at its nodes has to stay within them itself: ``step.tree`` is then its tree.

    Args:
        max_depth: Largest depth of a candidate; deeper ones could never be emitted.
        max_nodes: Largest number of nodes that will be fed; with 0, `propose` should take no time.
        eos: End-of-sequence tokens; no candidate may follow one.
        max_scratch_depth: Largest depth of a scratch node; deeper ones lie beyond the base's context.
        draft_seed: Seed of the random numbers of this proposal. It is another one at every step of a text and is
            derived from the seed of the request, but independent of the numbers that accept drafts. A drafter that
            samples its drafts takes its random numbers from this seed alone: exact rejection relies on it.
        skip_module: Whether the draft module must not run; only drafters that `may_skip_module` are asked that.
    """

    max_depth: int
    max_nodes: int = 1024
    eos: frozenset[int] = frozenset()
    max_scratch_depth: int = 1024
    draft_seed: int = 0
    skip_module: bool = False


UNLIMITED = Limits(max_depth=1024)


def at_least_one(count: Tensor) -> Tensor:
    """The count, or 1 if it is 0, so that a sum can be divided by it."""
    return count.clamp(min=1)


@dataclass(frozen=True)
class TrainingBatch:
    """A batch of texts with the base's hidden states and its own next tokens.

    Args:
        hidden: (B, S, F * D) hidden states of the drafter's layers, concatenated.
        last_hidden: (B, S, D) normed last hidden states, from which the LM head reads the base's next-token
            distribution; None if a feature store does not hold them. Losses read it by `required_last_hidden`.
        input_ids: (B, S) the texts.
        labels: (B, S) the base's own next token at each position.
        loss_mask: (B, S) bool, true on assistant tokens.
        step: Optimizer steps taken before this batch. Schedules inside a loss depend on it alone, so a resumed run and
            one that accumulates gradients compute the same.
        divisor: Maps a count of loss terms to the number that their sum is divided by: the mean count of all processes,
            so that the mean of their losses is the mean over all terms. All processes must call it equally often.
    """

    hidden: Tensor
    last_hidden: Tensor | None
    input_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    step: int = 0
    divisor: Callable[[Tensor], Tensor] = at_least_one

    def required_last_hidden(self) -> Tensor:
        """The last hidden states (B, S, D).

        Raises:
            ValueError: The batch comes from a feature store that does not hold them.
        """
        if self.last_hidden is None:
            raise ValueError(
                "this drafter's loss reads the base's last hidden states, which the feature store does not hold: "
                "write it with `drafters features --with-last`"
            )
        return self.last_hidden


@dataclass(frozen=True)
class StepResult:
    """The outcome of one decoding step, as a drafter observes it.

    Args:
        num_pending: P, decided tokens that were fed; the last of them is the root.
        tree: The draft tree that was fed, M nodes.
        hidden: (P + M, F * D) hidden states of the drafter's layers, or None if it needs none.
        path: Accepted nodes, from the root down.
        emitted: Tokens added to the text: the accepted path and the bonus token, unless the text was cut.
        top_tokens: 1 + M lists of the base's most probable tokens, best first: the root's, then each node's. Their
            length is the drafter's ``required_outputs.top_k``. They do not depend on how tokens are sampled.
    """

    num_pending: int
    tree: DraftTree
    hidden: Tensor | None
    path: list[int]
    emitted: list[int]
    top_tokens: Sequence[Sequence[int]] = ()

    def committed_hidden(self) -> Tensor:
        """Hidden states (P + len(path), F * D) of the positions that this step added to the base's KV cache."""
        assert self.hidden is not None, "the drafter requires no hidden states"
        if self.path == list(range(len(self.path))):  # a slice needs no indices on the device
            return self.hidden[: self.num_pending + len(self.path)]
        rows = [*range(self.num_pending), *(self.num_pending + node for node in self.path)]
        return self.hidden[torch.tensor(rows, device=self.hidden.device)]


class Drafter(Protocol):
    """Proposes draft trees for one text at a time: `begin`, then `propose` and `observe` alternately.

    Only `propose` must be defined; the other methods do nothing unless a drafter overrides them.

    Args:
        required_outputs: What it needs from the base's forward pass.
        history_only: Whether proposals depend only on the tokens of the texts so far, so that answers can be replayed.
        remembers: Whether proposals may depend on texts decoded earlier, since the last `reset`.
        is_divisible: Whether a part of a draft is of use too; otherwise an automatic budget feeds all of it or none.
        samples_drafts: Whether drafts are drawn at random.
        may_skip_module: Whether it can draft without its draft module, too, as n-grams can beside one.
        draft_forwards: Number of forward passes of a draft module or draft model so far.
    """

    required_outputs: RequiredOutputs = RequiredOutputs()
    history_only: bool = False
    remembers: bool = True
    is_divisible: bool = True
    samples_drafts: bool = False
    may_skip_module: bool = False
    draft_forwards: int = 0

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a new text. What the drafter keeps across texts stays."""
        return None

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        """Propose continuations of ``seq``, whose last token is the root. Must not run the base."""

    def observe(self, step: StepResult) -> None:
        """Update the drafter's state with the outcome of a step."""
        return None

    def rewind(self, length: int) -> None:
        """Forget what lies beyond the first ``length`` tokens of the text, because they were rejected drafts.

        The last remaining token is a root again: what was observed at its position will be observed once more.
        """
        return None

    def reset(self) -> None:
        """Forget everything, including what is kept across texts."""
        return None


class NoDrafter(Drafter):
    """Proposes nothing, so that the base decodes one token per step (vanilla decoding)."""

    history_only, remembers = True, False

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        return DraftTree()


class LearnedDrafter(nn.Module, ABC):
    """A drafter with weights, trained on a frozen base by `train.module.DrafterTraining`.

    A subclass is registered by `drafters.registry.register`. Its constructor takes a `BaseShape` first; the other
    arguments are its recipe, which the YAML, the training checkpoint and the exported folder share. Options are grouped
    in frozen dataclasses. The group named ``draft`` holds what decoding may change; training fixes all others.

    Training calls `initialise` once and then `loss` for each batch; validation calls `draft_at`. Decoding calls
    `attach_base_weights` once, and for each text, as of every `Drafter`, `begin`, then `propose` and `observe` in turn.
    """

    required_outputs: RequiredOutputs
    history_only = remembers = samples_drafts = may_skip_module = False
    is_divisible, draft_forwards = True, 0
    base_weights: BaseWeights | None = None

    # ---- training

    def initialise(self, base_weights: BaseWeights) -> None:
        """Copy weights of the base into those that start as copies, once and before a checkpoint is loaded."""

    @abstractmethod
    def loss(self, batch: TrainingBatch, base_weights: BaseWeights) -> tuple[Tensor, dict[str, Tensor]]:
        """The training loss of a batch, a scalar, and further scalars to log, by name."""

    @abstractmethod
    def draft_at(
        self, hidden: Tensor, input_ids: Tensor, anchors: Tensor, base_weights: BaseWeights, limits: Limits = UNLIMITED
    ) -> list[DraftTree]:
        """The trees that decoding would propose at several anchors of one known text, in one go.

        Args:
            hidden: (S, F * D) hidden states of the drafter's layers.
            input_ids: (S,) the text.
            anchors: (A,) positions of the roots.
            base_weights: The base's embedding and LM head.
            limits: Limits of every proposal.
        """

    # ---- decoding

    def attach_base_weights(self, base_weights: BaseWeights) -> None:
        """Give the drafter the base's embedding and LM head for decoding; they stay out of ``state_dict``."""
        self.__dict__["base_weights"] = base_weights  # nn.Module would register them

    @abstractmethod
    def begin(self, prompt: Sequence[int]) -> None:
        """Start a new text: empty the draft module's cache."""

    @abstractmethod
    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        """Propose continuations of ``seq`` from the hidden states observed so far, which are those before the root."""

    @abstractmethod
    def observe(self, step: StepResult) -> None:
        """Take over the hidden states of the positions that a step committed (`StepResult.committed_hidden`)."""

    @abstractmethod
    def rewind(self, length: int) -> None:
        """Forget observed positions from ``length - 1`` on, as `Drafter.rewind` says."""

    def reset(self) -> None:
        """Forget what is kept across texts. Nothing by default."""
