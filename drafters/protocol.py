"""The interface between the decoding loop, the training loop and the drafters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from drafters.tree import DraftTree


@dataclass(frozen=True)
class BaseShape:
    """Dimensions of a base, from which a learned drafter is built."""

    hidden_size: int  # width D of the hidden states
    vocab_size: int  # V
    num_layers: int  # decoder layers
    num_heads: int  # attention heads
    head_dim: int  # width of one head
    intermediate_size: int  # width of the feed-forward layer
    rope_theta: float = 10000.0  # base of the rotary position embedding
    norm_eps: float = 1e-6  # epsilon of the RMS norms
    rope_factor: float = 1.0  # of Llama 3's scaling of low frequencies, which only imported drafters have; 1 for none
    rope_low_frequency: float = 1.0  # turns within the original length up to which a frequency is scaled in full
    rope_high_frequency: float = 4.0  # turns from which on a frequency is not scaled
    rope_original_length: int = 8192  # context length before the scaling

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (isinstance(value, int | float) and 0 < value < inf):
                raise ValueError(f"{name} of the base is {value!r}, not a positive number")


class PackedHead(Protocol):
    """A packed copy of an LM head: it multiplies a few states (..., D), without a gradient."""

    def __call__(self, states: Tensor, /) -> Tensor: ...

    def rows(self, tokens: Tensor) -> PackedHead:
        """A packed copy of the rows for these tokens (V',)."""


@dataclass(frozen=True)
class BaseWeights:
    """Frozen weights of the base that a learned drafter uses but does not own."""

    embedding: Tensor  # (V, D) the token embedding
    head: Tensor  # (V, D) the LM head
    packed_head: PackedHead | None = None  # None: the plain product


@dataclass(frozen=True)
class RequiredOutputs:
    """What a drafter needs from the base's forward pass, at every position that is fed."""

    hidden_layers: tuple[int, ...] = ()  # whose hidden states; 0 is the embedding, -1 the normed last hidden state
    top_k: int = 0  # how many of the base's most probable tokens, at the root and every node; 1 is the argmax


@dataclass(frozen=True)
class Limits:
    """Limits of one proposal. Nodes beyond them are pruned.

    A drafter that reads the base's outputs at its nodes has to stay within them itself: ``step.tree`` is then its tree.
    A drafter that samples its drafts takes its random numbers from ``draft_seed`` alone: exact rejection relies on it.
    The seed differs at every step of a text and comes from the seed of the request, independently of the numbers that
    accept drafts.
    """

    max_depth: int  # of a candidate; deeper ones could never be emitted
    max_nodes: int = 1024  # number of nodes that will be fed; with 0, `propose` should take no time
    eos: frozenset[int] = frozenset()  # end-of-sequence tokens; no candidate may follow one
    max_scratch_depth: int = 1024  # of a scratch node; deeper ones lie beyond the base's context
    draft_seed: int = 0


UNLIMITED = Limits(max_depth=1024)


def at_least_one(count: Tensor) -> Tensor:
    """The count, or 1 if it is 0, so that a sum can be divided by it."""
    return count.clamp(min=1)


@dataclass(frozen=True)
class TrainingBatch:
    """A batch of texts with the base's hidden states and its own next tokens.

    ``divisor`` gives the mean count of all processes, so that the mean of their losses is the mean over all terms; all
    processes must call it equally often.
    """

    hidden: Tensor  # (B, S, F * D) hidden states of the drafter's layers, concatenated
    last_hidden: Tensor | None  # (B, S, D) normed last hidden states; None if the feature store does not hold them
    input_ids: Tensor  # (B, S) the texts
    labels: Tensor  # (B, S) the base's own next token at each position
    loss_mask: Tensor  # (B, S) bool, true on assistant tokens
    divisor: Callable[[Tensor], Tensor] = at_least_one  # maps a count of loss terms to what their sum is divided by

    def required_last_hidden(self) -> Tensor:
        """The last hidden states (B, S, D), which give the base's distributions; ValueError if there are none."""
        if self.last_hidden is None:
            raise ValueError(
                "this drafter's loss reads the base's last hidden states, which the feature store does not hold: "
                "write it with layer -1 too (`drafters features --layers ...,-1`)"
            )
        return self.last_hidden


@dataclass(frozen=True)
class StepResult:
    """The outcome of one decoding step, as a drafter observes it."""

    num_pending: int  # P, decided tokens that were fed; the last of them is the root
    tree: DraftTree  # the draft tree that was fed, M nodes
    # (P + M, F * D) hidden states of the drafter's layers, or None if it needs none. A base that is run in CUDA graphs
    # overwrites them at its next step.
    hidden: Tensor | None
    path: list[int]  # accepted nodes, from the root down
    emitted: list[int]  # tokens added to the text: the accepted path and the bonus token, unless the text was cut
    # 1 + M lists of the base's `RequiredOutputs.top_k` most probable tokens, best first: the root's, then each node's.
    # They do not depend on how tokens are sampled.
    top_tokens: Sequence[Sequence[int]] = ()

    def committed_hidden(self, is_copied: bool = False) -> Tensor:
        """Hidden states (P + len(path), F * D) of the positions that this step added to the base's KV cache.

        They may be a view of ``hidden`` unless ``is_copied``.
        """
        assert self.hidden is not None, "the drafter requires no hidden states"
        if self.path == list(range(len(self.path))):  # a slice needs no indices on the device
            hidden = self.hidden[: self.num_pending + len(self.path)]
            return hidden.clone() if is_copied else hidden
        rows = [*range(self.num_pending), *(self.num_pending + node for node in self.path)]
        places = torch.tensor(rows, pin_memory=self.hidden.is_cuda)  # a pinned copy does not wait for the device
        return self.hidden[places.to(self.hidden.device, non_blocking=True)]


@runtime_checkable
class Drafter(Protocol):
    """Proposes draft trees for one text at a time: `begin`, then `propose` and `observe` alternately.

    Only `propose` must be defined; the other methods do nothing unless a drafter overrides them.
    """

    required_outputs: RequiredOutputs = RequiredOutputs()  # what it needs from the base's forward pass
    remembers: bool = True  # whether proposals may depend on texts decoded earlier, since the last `reset`
    samples_drafts: bool = False  # whether drafts are drawn at random
    draft_forwards: int = 0  # forward passes of a draft module or draft model so far

    def draft_in_graph(self, num_positions: int) -> None:
        """Draft in CUDA graphs, if the drafter can, with room for texts of so many positions.

        A session calls it before `begin`, whenever its base is run in graphs that hold other numbers of positions.
        """
        return None

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a new text. What the drafter keeps across texts stays."""
        return None

    @abstractmethod
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

    remembers = False

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        return DraftTree()


class LearnedDrafter(nn.Module, Drafter):
    """A drafter with weights, trained on a frozen base by `train.module.DrafterTraining`.

    A subclass is registered by `drafters.registry.register`. Its constructor takes a `BaseShape` first; the other
    arguments are its recipe, which the YAML, the training checkpoint and the exported folder share. Options are grouped
    in frozen dataclasses. The group named ``draft`` holds what decoding may change; training fixes all others.

    Training calls `initialise` once and then `loss` for each batch; validation calls `draft_at`. Decoding calls
    `attach_base_weights` once, and then what it calls of every `Drafter`. `propose` drafts from the hidden states that
    `observe` took over so far (`StepResult.committed_hidden`), which are those before the root.
    """

    required_outputs: RequiredOutputs
    distillation: bool = False  # whether it learns the base's whole distributions, not their most probable tokens alone
    remembers = False
    base_weights: BaseWeights | None = None

    def initialise(self, base_weights: BaseWeights) -> None:
        """Copy weights of the base into those that start as copies, before a checkpoint is loaded.

        Training calls it again when it has chosen the draft vocabulary.
        """

    @abstractmethod
    def loss(self, batch: TrainingBatch, base_weights: BaseWeights) -> tuple[Tensor, dict[str, Tensor]]:
        """The training loss of a batch, a scalar, and further scalars to log, by name."""

    @abstractmethod
    def draft_at(
        self, hidden: Tensor, input_ids: Tensor, anchors: Tensor, base_weights: BaseWeights, limits: Limits = UNLIMITED
    ) -> list[DraftTree]:
        """The trees that decoding would propose at several anchors of one known text, in one go.

        Takes the hidden states of the drafter's layers (S, F * D), the text (S,), the positions of the roots (A,), and
        the limits of every proposal.
        """

    def attach_base_weights(self, base_weights: BaseWeights) -> None:
        """Give the drafter the base's embedding and LM head for decoding; they stay out of ``state_dict``."""
        self.__dict__["base_weights"] = base_weights  # nn.Module would register them
