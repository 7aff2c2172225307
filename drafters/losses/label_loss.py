"""What the losses of the labels after an anchor share: options, weights by depth, the mean."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.checks import check_at_least
from drafters.losses.anchors import AnchoredFrames
from drafters.losses.chunks import anchors_per_chunk, chunked


@dataclass(frozen=True)
class LabelLossOptions:
    """How the labels after an anchor enter the loss.

    Args:
        decay: Weight of label u relative to label u - 1.
        num_anchors: Anchors sampled from each training sequence; 0 takes every assistant position.
        num_columns: Number of tokens that a training step compares: the labels, and a random sample of the others that
            stands for all; null for the whole (draft) vocabulary.
    """

    decay: float = 0.9
    num_anchors: int = 64
    num_columns: int | None = None

    def __post_init__(self) -> None:
        check_at_least(0, decay=self.decay, num_anchors=self.num_anchors)
        check_at_least(1, num_columns=self.num_columns or 1)


def by_depth(counts: Tensor, decay: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """w_u = decay^(u-1) over the labels that count (A, U) bool, normalised to a sum of one: (A, U)."""
    weights = counts * decay ** torch.arange(counts.shape[1], device=counts.device, dtype=dtype)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)


def mean_over_anchors(
    sums: Callable[..., tuple[Tensor, Tensor]],
    x: AnchoredFrames,
    output: Sequence[Tensor | None],
    num_vectors: int,
    vocab_size: int,
    divisor: Callable[[Tensor], Tensor],
    num_calls: int = 64,
) -> tuple[Tensor, Tensor]:
    """The loss and the numbers that ``sums`` adds up (`chunked`), divided by the number of anchors with a label.

    ``num_vectors`` are the vectors over the vocabulary that each anchor holds, ``num_calls`` the operators that a chunk
    calls with its gradient. The ``divisor`` is that of `TrainingBatch`.
    """
    size = anchors_per_chunk(num_vectors, vocab_size, x.frames.device, num_calls)
    loss, numbers = chunked(sums, x, output, size)
    num_anchors = divisor(x.valid[:, 0].sum())
    return loss / num_anchors, numbers / num_anchors
