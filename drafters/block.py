"""The block drafter: the CTC drafter's trunk trained with cross-entropy, one token per frame (DFlash)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from drafters.checks import check_at_least
from drafters.losses import gathered_logits
from drafters.losses.anchors import AnchoredFrames, LabelLossOptions, by_depth, mean_over_anchors
from drafters.losses.chunks import anchors_per_chunk
from drafters.parallel import ParallelDrafter, ParallelDraftOptions, TrunkOptions
from drafters.protocol import BaseShape, BaseWeights, TrainingBatch, at_least_one
from drafters.registry import register


@dataclass(frozen=True)
class BlockTrunkOptions(TrunkOptions):
    """The network of the block drafter.

    Args:
        sample_from_anchor: Whether frame 0, which carries the root, predicts the next token, as in DSpark. Otherwise it
            predicts nothing, as in DFlash, and a draft has ``num_frames - 1`` tokens.
    """

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
    """

    def __init__(
        self,
        base: BaseShape,
        trunk: BlockTrunkOptions = BlockTrunkOptions(),
        loss: LabelLossOptions = LabelLossOptions(),
        draft: BlockDraftOptions = BlockDraftOptions(),
    ) -> None:
        first_frame = 0 if trunk.sample_from_anchor else 1
        super().__init__(base, trunk, trunk.num_frames - first_frame, loss, draft, first_frame)

    def loss(self, batch: TrainingBatch, base_weights: BaseWeights) -> tuple[Tensor, dict[str, Tensor]]:
        anchored, head, right = self.loss_inputs(batch, base_weights)
        return cross_entropy(anchored, head, right, self.loss_options, batch.divisor)


def cross_entropy(
    anchored: AnchoredFrames,
    head: Tensor,
    right: Tensor | None = None,
    options: LabelLossOptions = LabelLossOptions(),
    divisor: Callable[[Tensor], Tensor] = at_least_one,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean of sum_u w_u * -log p_u(y_u | y_{u-1}) over the anchors that have a label, and metrics.

    p_u(v | l) = softmax_v(z_u(v) + B[l, v]) over the V tokens; where passages are copied, these terms are those of
    `AnchoredFrames.with_copies`. The weights w_u of an anchor are proportional to decay^(u-1) and sum to one.

    The base's LM head (V, D) is frozen; ``right`` (V, R) is the right factor of the Markov bias, if there is one.
    Frames beyond the number of labels are not trained. The metric is ``expected_acceptance``, the mean of
    sum_u p_1(y_1) ... p_u(y_u). It and the loss are scalars, zero without labels.
    """
    num_labels = anchored.labels.shape[1]
    assert anchored.frames.shape[1] >= num_labels, "each label needs a frame"

    def sums(x: AnchoredFrames, right: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = gathered_logits.logits(x.frames, head)  # (A, U, V)
        if x.left is not None and right is not None:
            logits += x.left.to(logits.dtype) @ right.to(logits.dtype).T
        exponentials, largest, picked = gathered_logits.exponentials(logits, x.labels[..., None])
        log_sum = gathered_logits.log_sum(exponentials, largest)
        prefix = x.with_copies((picked - log_sum)[..., 0].cumsum(-1))  # (A, U)
        log_probs = prefix.diff(prepend=torch.zeros_like(prefix[:, :1]))
        weight = by_depth(x.valid, options.decay, log_probs.dtype)
        return -(weight * log_probs).sum(), torch.where(x.valid, prefix.exp(), 0.0).sum()

    left = None if anchored.left is None else anchored.left[:, :num_labels]
    anchored = anchored._replace(frames=anchored.frames[:, :num_labels], left=left)
    # Vectors over the vocabulary that a chunk holds of each label: the logits and the bias.
    size = anchors_per_chunk(num_labels * (1 + (right is not None)), len(head), head.device)
    loss, acceptance = mean_over_anchors(sums, anchored, [right], size, divisor)
    return loss, {"expected_acceptance": acceptance}
