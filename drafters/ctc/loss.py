"""The CTC losses over many anchors, in chunks: the logits over the vocabulary are never stored completely.

`drafters.ctc.reference` has the mathematics and its plain form. Here it is in log space, over the few columns of the
vocabulary that the labels name, with a gradient of its own. Shapes: A anchors, T frames, U labels, V tokens, D hidden
size, R rank of the Markov bias, and C = U + 1 tokens that may come last (the root and y_1..y_U), or 1 without a bias.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from drafters.checks import check_at_least, check_choices
from drafters.losses import gathered_logits
from drafters.losses.anchors import IMPOSSIBLE, AnchoredFrames, LabelLossOptions, by_depth, mean_over_anchors
from drafters.losses.chunks import anchors_per_chunk
from drafters.protocol import at_least_one

FRAME_CALLS, OTHER_CALLS = 10, 180
"""Operators that a chunk calls for each frame of the recursion and its gradient, and about how many others."""


@dataclass(frozen=True)
class CTCLossOptions(LabelLossOptions):
    """The CTC drafter's loss.

    Args:
        num_labels: U, number of next tokens that a draft is trained on; at most ``num_frames``, fewer if tokens repeat.
        objective: ``ctc``, the paper's sequence loss, or ``prefix``, the weighted log-probabilities of all prefixes,
            which is what verification rewards. The paper's loss has no label weights.
    """

    num_labels: int = 8
    objective: Literal["ctc", "prefix"] = "prefix"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self)
        check_at_least(1, num_labels=self.num_labels)


class CTCOutput(NamedTuple):
    """The trained weights of the output layer, in addition to the base's frozen LM head."""

    blank_row: Tensor  # (D,) weights of the blank
    blank_bias: Tensor  # () bias of the blank
    right: Tensor | None = None  # (V + 1, R) right factor of the Markov bias, the blank last; None without a bias


def ctc_loss(
    anchored: AnchoredFrames,
    head: Tensor,
    output: CTCOutput,
    options: CTCLossOptions = CTCLossOptions(),
    divisor: Callable[[Tensor], Tensor] = at_least_one,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean loss over the anchors that have a label, and metrics.

    The objective ``ctc`` is the paper's equation 6, -log P(the text is y_1..y_n) / n for the n valid labels. The
    objective ``prefix`` is sum_u w_u * -log P(the text begins with y_1..y_u), which is what a verifier rewards. The
    weights w_u of an anchor are proportional to decay^(u-1) and sum to one. Labels that no alignment can reach, because
    there are too few frames, contribute nothing.

    The base's LM head (V, D) is frozen. The metrics are ``blank_share``, the mean of p_t(blank | root), and
    ``expected_acceptance``, the mean of sum_u P(text begins with y_1..y_u) over valid labels. They and the loss are
    scalars, zero without labels.
    """

    def sums(x: AnchoredFrames, *weights: Tensor) -> tuple[Tensor, Tensor]:
        emissions = emit(x, head, CTCOutput(*weights))
        states = run_recursion(*emissions, x.labels)
        prefix = x.with_copies(states.prefix)
        counts = x.valid & is_possible(prefix)  # (A, U)
        acceptance = torch.where(counts, prefix.exp(), 0.0).sum()  # sum_u P(begins with y_1..y_u)
        prefix = torch.where(counts, prefix, 0.0)
        weight = by_depth(counts, options.decay, prefix.dtype)  # 0 where no alignment reaches the label
        loss = -(weight * prefix).sum() if options.objective == "prefix" else sequence_loss(states.exact, x.valid)
        blank_share = (emissions.blank[..., 0].exp().mean(1) * x.valid[:, 0]).sum()
        return loss, torch.stack([blank_share, acceptance])

    # Vectors over the vocabulary that a chunk holds of each anchor: its frames', and the bias's after each token.
    num_frames, num_labels = anchored.frames.shape[1], anchored.labels.shape[1]
    num_vectors = num_frames + (0 if output.right is None else num_labels + 1)
    size = anchors_per_chunk(num_vectors, len(head), head.device, OTHER_CALLS + num_frames * FRAME_CALLS)
    loss, numbers = mean_over_anchors(sums, anchored, output, size, divisor)
    return loss, dict(zip(("blank_share", "expected_acceptance"), numbers, strict=True))


def sequence_loss(exact: Tensor, valid: Tensor) -> Tensor:
    """The paper's equation 6, summed: -log P(the text is y_1..y_n) / n from log P(the text is y_1..y_u) (A, U + 1)."""
    lengths = valid.sum(-1)  # (A,)
    log_prob = exact.gather(1, lengths[:, None])[:, 0]
    is_reached = is_possible(log_prob) & (lengths > 0)
    return -(torch.where(is_reached, log_prob, 0.0) / lengths.clamp(min=1)).sum()


# ---- the frames' distributions


class Emissions(NamedTuple):
    """The distributions of A anchors' frames, as far as the labels need them."""

    enter: Tensor  # (A, T, U) log p_t(y_u | y_{u-1}), where y_0 is the root
    stay: Tensor  # (A, T, U) log p_t(y_u | y_u)
    blank: Tensor  # (A, T, C) log p_t(blank | y_u), u = 0..U


def emit(x: AnchoredFrames, head: Tensor, output: CTCOutput) -> Emissions:
    """p_t(v | l) = softmax_v(z_t(v) + B[l, v]) over V tokens and the blank, where l is the last emitted label.

    The normalisers of T frames after U + 1 labels are one matrix product, sum_v exp z_t(v) exp B[l, v].
    """
    index = x.labels[:, None].expand(-1, x.frames.shape[1], -1)
    exponentials, largest, picked = gathered_logits.exponentials(gathered_logits.logits(x.frames, head), index)
    dtype = largest.dtype
    blank = (x.frames.to(dtype) @ output.blank_row.to(dtype) + output.blank_bias.to(dtype))[..., None]  # (A, T, 1)
    if x.left is None or output.right is None:
        log_sum = torch.logaddexp(gathered_logits.log_sum(exponentials, largest), blank)
        enter = picked - log_sum  # (A, T, U)
        return Emissions(enter, enter, blank - log_sum)
    left, right = x.left.to(dtype), output.right.to(dtype)
    biases = left @ right[:-1].T  # (A, C, V)
    factors, largest_bias, _ = gathered_logits.exponentials(biases, x.labels.new_empty(*biases.shape[:2], 0))
    largest_bias = largest_bias.mT  # (A, 1, C)
    blank = blank + (left @ right[-1])[:, None]  # (A, T, C)
    sums = gathered_logits.products(exponentials, factors).clamp(min=torch.finfo(dtype).tiny)
    log_sum = torch.logaddexp(sums.log() + largest + largest_bias, blank)
    label_columns = F.embedding(x.labels, right)  # (A, U, R)
    enter_bias, stay_bias = ((part * label_columns).sum(-1)[:, None] for part in (left[:, :-1], left[:, 1:]))
    enter, stay = picked + enter_bias - log_sum[..., :-1], picked + stay_bias - log_sum[..., 1:]  # (A, T, U)
    return Emissions(enter, stay, blank - log_sum)


# ---- the recursion over frames


class States(NamedTuple):
    """Log-probabilities that the losses read; at most `IMPOSSIBLE` / 2 where no alignment contributes."""

    entered: Tensor  # (T, A, U) log enter_t of y_1..y_u, t = 1..T
    ends: Tensor  # (2, A, U + 1) log b_T and log n_T of y_1..y_u, u = 0..U

    @property
    def exact(self) -> Tensor:
        """(A, U + 1): log P(the text is y_1..y_u) for u = 0..U."""
        return torch.logaddexp(*self.ends)

    @property
    def prefix(self) -> Tensor:
        """(A, U): log P(the text begins with y_1..y_u) for u = 1..U."""
        return self.entered.logsumexp(0)


def run_recursion(enter: Tensor, stay: Tensor, blank: Tensor, labels: Tensor) -> States:
    """The recursion of `drafters.ctc.reference` in log space, from the `Emissions` for labels (A, U)."""
    num_anchors, num_labels = labels.shape
    barred = enter.new_zeros(2, num_anchors, num_labels + 1)  # log (c != l) of the moves to a blank and to a label c
    barred[1, :, 1:-1].masked_fill_(labels[:, 1:] == labels[:, :-1], IMPOSSIBLE)
    blank = blank.expand(-1, -1, num_labels + 1)
    return States(*_Recursion.apply(*(x.transpose(0, 1) for x in (enter, stay, blank)), barred))


def is_possible(log_probs: Tensor) -> Tensor:
    """True where at least one alignment contributes to the log-probability."""
    return log_probs > IMPOSSIBLE / 2


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """The share of a log-probability in a log-sum; zero where the sum is impossible."""
    return torch.where(is_possible(whole), (part - whole).exp(), 0.0)


class _Recursion(torch.autograd.Function):
    """The recursion, with a gradient computed from the saved states.

    Each log-add distributes its gradient to its two terms by their shares in the sum. The shares of all frames are
    computed at once, so that the loop over frames only multiplies. Upstream gradients may have any sign. A frame moves
    from a text in two ways, to a blank behind it or to its next label, which one operator computes together.
    """

    @staticmethod
    def forward(ctx, enter: Tensor, stay: Tensor, blank: Tensor, barred: Tensor) -> tuple[Tensor, Tensor]:
        moves = torch.stack([blank, F.pad(enter, (0, 1), value=IMPOSSIBLE)], 1)  # (T, 2, A, U + 1)
        # Of each text: b_t, enter_t of its next label, and n_t, which the empty text (column 0) never reaches.
        states = enter.new_full((len(enter) + 1, 3, *moves.shape[2:]), IMPOSSIBLE)
        states[0, 0, :, 0] = 0.0
        sources = torch.empty_like(moves)  # the probabilities of being where each move begins
        for before, after, move, source, stays in zip(states, states[1:], moves, sources, stay, strict=False):
            torch.logaddexp(before[0], before[2] + barred, out=source)
            torch.add(source, move, out=after[:2])
            torch.logaddexp(stays + before[2, :, 1:], after[1, :, :-1], out=after[2, :, 1:])
        ctx.save_for_backward(stay, barred, states, sources)
        ctx.set_materialize_grads(False)
        return states[1:, 1, :, :-1], states[-1, ::2]

    @staticmethod
    @once_differentiable
    def backward(ctx, d_entered: Tensor | None, d_ends: Tensor | None) -> tuple[Tensor | None, ...]:
        stay, barred, states, sources = ctx.saved_tensors
        blank_end, label_end, after = states[:-1, 0], states[:-1, 2], states[1:, 2, :, 1:]
        enter_share = _ratio(states[1:, 1, :, :-1], after)
        stay_share = _ratio(stay + label_end[..., 1:], after)
        passing = label_end[:, None] + barred  # (T, 2, A, U + 1)
        begins = torch.stack([blank_end[:, None].expand_as(passing), passing], 2)
        begin_shares = _ratio(begins, sources[:, :, None])  # (T, 2, 2, A, U + 1): of b_t and n_t in each move's source
        d_stay, d_states = torch.empty_like(stay), torch.zeros_like(states)
        if d_entered is not None:
            d_states[1:, 1, :, :-1].copy_(d_entered)
        if d_ends is not None:
            d_states[-1, ::2].copy_(d_ends)
        for t in reversed(range(len(stay))):
            d_before, d_after = d_states[t], d_states[t + 1]
            d_labels = d_after[2, :, 1:]
            d_after[1, :, :-1].addcmul_(d_labels, enter_share[t])
            d_before[::2].addcmul_(d_after[0], begin_shares[t, 0]).addcmul_(d_after[1], begin_shares[t, 1])
            d_before[2, :, 1:].add_(torch.mul(d_labels, stay_share[t], out=d_stay[t]))
        return d_states[1:, 1, :, :-1], d_stay, d_states[1:, 0], None
