"""What the losses of the labels after an anchor share: options, weights by depth, distillation, the mean."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.checks import check_at_least
from drafters.losses import distillation
from drafters.losses.anchors import AnchoredFrames
from drafters.losses.chunks import anchors_per_chunk, chunked


@dataclass(frozen=True)
class LabelLossOptions:
    """How the labels after an anchor enter the loss.

    Args:
        decay: Weight of label u relative to label u - 1.
        distillation: Weight of the KL divergence of the draft's distributions from the base's; 0 for none.
        teacher_temperature: Temperature of the base's distribution in distillation; 0 for its most probable token, as
            in greedy decoding.
        label_weight: Weight of the loss of the labels beside distillation.
        num_anchors: Anchors sampled from each training sequence; 0 takes every assistant position.
        num_columns: Number of tokens that a training step compares: the labels, and a random sample of the others that
            stands for all; null for the whole (draft) vocabulary.
    """

    decay: float = 0.9
    distillation: float = 0.0
    teacher_temperature: float = 1.0
    label_weight: float = 1.0
    num_anchors: int = 64
    num_columns: int | None = None

    def __post_init__(self) -> None:
        check_at_least(0, decay=self.decay, distillation=self.distillation, label_weight=self.label_weight)
        check_at_least(0, teacher_temperature=self.teacher_temperature)
        check_at_least(0, num_anchors=self.num_anchors)
        check_at_least(1, num_columns=self.num_columns or 1)
        if self.num_columns and self.distillation:
            raise ValueError("distillation needs the draft's probabilities of all tokens: leave out num_columns")
        if self.teacher_temperature != 1 and not self.distillation:
            raise ValueError("teacher_temperature belongs to distillation, which is 0: raise it, for example to 1")
        if not (self.distillation or self.label_weight):
            raise ValueError("label_weight and distillation are both 0, so nothing is trained: raise one of them")


def by_depth(counts: Tensor, decay: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """w_u = decay^(u-1) over the labels that count (A, U) bool, normalised to a sum of one: (A, U)."""
    weights = counts * decay ** torch.arange(counts.shape[1], device=counts.device, dtype=dtype)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)


def distilled(
    x: AnchoredFrames, draft: Callable[[], Tensor], weight: Tensor, head: Tensor, options: LabelLossOptions
) -> Tensor:
    """sum_u w_u KL(p || q_u) over the anchors, times its weight in the loss; labels without a teacher are left out.

    ``draft`` computes the draft's next-token distributions q_u (A, U, V) after the base's p, to save memory. The
    weights w are (A, U), the base's LM head (V, D).
    """
    assert x.teacher is not None, "distillation needs the base's last hidden states"
    base = distillation.teacher_probs(x.teacher, head, options.teacher_temperature)  # (A, U, V)
    if x.teacher_valid is not None:
        weight = weight * x.teacher_valid
    return options.distillation * (weight * distillation.kl(base, draft())).sum()


def mean_over_anchors(
    sums: Callable[..., tuple[Tensor, Tensor]],
    x: AnchoredFrames,
    output: Sequence[Tensor | None],
    num_vectors: int,
    vocab_size: int,
    divisor: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """The loss and the numbers that ``sums`` adds up (`chunked`), divided by the number of anchors with a label.

    ``num_vectors`` are the vectors over the vocabulary that each anchor holds. The ``divisor`` is that of
    `TrainingBatch`.
    """
    size = anchors_per_chunk(num_vectors, vocab_size, x.frames.device)
    loss, numbers = chunked(sums, x, output, size)
    num_anchors = divisor(x.valid[:, 0].sum())
    return loss / num_anchors, numbers / num_anchors
