"""The block drafter: the CTC drafter's trunk trained with cross-entropy, one token per frame (DFlash)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from drafters.checks import check_at_least
from drafters.losses.cross_entropy import cross_entropy
from drafters.losses.label_weights import LabelLossOptions
from drafters.nn.markov import Markov, markov_bias
from drafters.parallel import ParallelDrafter, ParallelDraftOptions, TrunkOptions
from drafters.protocol import BaseShape, BaseWeights, Limits, TrainingBatch
from drafters.registry import register
from drafters.tree import DraftTree
from drafters.trees import best_first
from drafters.trees.candidates import CandidateBatch
from drafters.trees.chains import Chains, chains


@dataclass(frozen=True)
class BlockTrunkOptions(TrunkOptions):
    """The network of the block drafter.

    Args:
        frames_differ: Give each frame an input embedding of its own. Otherwise they share one and differ only by their
            position.
        sample_from_anchor: Whether frame 0, which carries the root, predicts the next token, as in DSpark. Otherwise it
            predicts nothing, as in DFlash, and a draft has ``num_frames - 1`` tokens.
    """

    frames_differ: bool = False
    sample_from_anchor: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1 if self.sample_from_anchor else 2, num_frames=self.num_frames)


@dataclass(frozen=True)
class BlockDraftOptions(ParallelDraftOptions):
    """How the block drafter's frames become a draft tree; decoding may change these options.

    Args:
        tree: ``best_first``, the most probable paths, or ``chain``, the most probable token of each frame.
    """

    tree: Literal["best_first", "chain"] = "best_first"


@register("block")
class Block(ParallelDrafter):
    """A block of masked frames filled in one pass (DFlash, arXiv 2602.06036); frame u predicts the u-th next token.

    Frame 0 carries the root's embedding, all others one mask embedding. Unlike in DFlash, frame 0 predicts too, as in
    DSpark (arXiv 2607.05147), whose Markov bias is an option. ``sample_from_anchor: false`` is DFlash.

    Args:
        base: Dimensions of the base; filled in by the trainer.
        trunk: The network.
        loss: The loss.
        draft: The draft tree.
    """

    def __init__(
        self,
        base: BaseShape,
        trunk: BlockTrunkOptions = BlockTrunkOptions(),
        loss: LabelLossOptions = LabelLossOptions(),
        draft: BlockDraftOptions = BlockDraftOptions(),
    ) -> None:
        first_frame = 0 if trunk.sample_from_anchor else 1
        super().__init__(base, trunk, trunk.num_frames - first_frame, loss, draft, trunk.frames_differ)
        self.first_frame = first_frame
        self.loss_options = loss
        rank, factors = trunk.markov_rank, trunk.markov_factors
        self.markov = markov_bias(base, rank, factors, has_blank=False, num_drafted=trunk.draft_vocab_size)

    def loss(self, batch: TrainingBatch, base_weights: BaseWeights) -> tuple[Tensor, dict[str, Tensor]]:
        options = self.loss_options.at_step(batch.step) if self.training else self.loss_options
        inputs = self.loss_inputs(batch, base_weights, with_teacher=bool(options.distillation))
        return cross_entropy(*inputs, options, divisor=batch.divisor)

    def grow(self, drafts: CandidateBatch, limits: Limits) -> list[DraftTree]:
        found = best_first.search_batch(drafts.probs, drafts.tokens, self.search_limits(limits), drafts.bias)
        return [self.cut_to_budget(*tree) for tree in found]

    def biased_chains(
        self, logits: Tensor, roots: Tensor, candidates: Tensor, markov: Markov, num_tokens: int
    ) -> Chains:
        return chains(logits, roots, candidates, markov, num_tokens)
