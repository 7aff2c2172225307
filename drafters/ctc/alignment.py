"""CTC alignments: from frames to text, and the probability of a text as a sum over its alignments."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IMPOSSIBLE = -1e30
"""Log-probability of the impossible; finite, so that the difference of two of them is finite too."""


def collapse(frames: Tensor, blank: int, merge_repeats: bool = True) -> list[int]:
    """Merge repeated frames, then drop blanks (the CTC paper's beta inverse, section 2.3).

    Without ``merge_repeats`` only blanks are dropped (selfless-CTC, arXiv 2110.03098).

    >>> collapse(torch.tensor([7, 7, 0, 7, 5]), blank=0)
    [7, 7, 5]
    >>> collapse(torch.tensor([7, 7, 0, 7, 5]), blank=0, merge_repeats=False)
    [7, 7, 7, 5]
    """
    kept = frames.unique_consecutive() if merge_repeats else frames
    return [token for token in kept.tolist() if token != blank]


def is_possible(log_probs: Tensor) -> Tensor:
    """True where at least one alignment contributes to the log-probability."""
    return log_probs > IMPOSSIBLE / 2


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """The share of a log-probability in a log-sum; zero where the sum is impossible."""
    return torch.where(is_possible(whole), (part - whole).exp(), 0.0)


class _Recursion(torch.autograd.Function):
    """The forward recursion in log space, with a gradient computed from the saved states.

    Each log-add distributes its gradient to its two terms by their shares in the sum. The shares of all frames are
    computed at once, so that the loop over frames only multiplies. Upstream gradients may have any sign.
    """

    @staticmethod
    def forward(ctx, enter: Tensor, stay: Tensor, blank: Tensor, barred: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        num_frames, num_anchors, num_labels = enter.shape
        blank_end = enter.new_full((num_frames + 1, num_anchors, num_labels + 1), IMPOSSIBLE)
        label_end = torch.full_like(blank_end, IMPOSSIBLE)  # column 0 is the empty text, which ends in no label
        entered = torch.empty_like(enter)
        blank_end[0, :, 0] = 0.0
        for t in range(num_frames):
            before, after = (blank_end[t], label_end[t]), (blank_end[t + 1], label_end[t + 1])
            source = torch.logaddexp(before[0][:, :-1], before[1][:, :-1] + barred)
            torch.add(enter[t], source, out=entered[t])
            torch.add(torch.logaddexp(*before), blank[t], out=after[0])
            after[1][:, 1:] = torch.logaddexp(stay[t] + before[1][:, 1:], entered[t])
        ctx.save_for_backward(stay, barred, blank_end, label_end, entered)
        return entered, blank_end, label_end

    @staticmethod
    @once_differentiable
    def backward(ctx, d_entered: Tensor, d_blank_end: Tensor, d_label_end: Tensor) -> tuple[Tensor | None, ...]:
        stay, barred, blank_end, label_end, entered = ctx.saved_tensors
        before, after = label_end[:-1], label_end[1:, :, 1:]
        either = torch.logaddexp(blank_end[:-1], before)
        passing = before[..., :-1] + barred
        source = torch.logaddexp(blank_end[:-1, :, :-1], passing)
        enter_share, stay_share = _ratio(entered, after), _ratio(stay + before[..., 1:], after)
        from_label, from_blank = _ratio(passing, source), _ratio(blank_end[:-1, :, :-1], source)
        label_share, blank_share = _ratio(before, either), _ratio(blank_end[:-1], either)
        d_stay, d_blank = torch.empty_like(stay), torch.empty_like(either)
        d_entered, d_labels, d_blanks = d_entered.clone(), d_label_end[-1].clone(), d_blank_end[-1]
        for t in reversed(range(len(stay))):
            d_blank[t] = d_blanks
            d_entered[t].addcmul_(d_labels[:, 1:], enter_share[t])
            torch.mul(d_labels[:, 1:], stay_share[t], out=d_stay[t])
            d_labels = torch.addcmul(d_label_end[t], d_blanks, label_share[t])
            d_labels[:, 1:] += d_stay[t]
            d_labels[:, :-1].addcmul_(d_entered[t], from_label[t])
            d_blanks = torch.addcmul(d_blank_end[t], d_blanks, blank_share[t])
            d_blanks[:, :-1].addcmul_(d_entered[t], from_blank[t])
        return d_entered, d_stay, d_blank, None


def states(
    enter: Tensor, stay: Tensor, blank: Tensor, labels: Tensor, merge_repeats: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the states of an alignment after each frame (Graves 2006, section 4.1).

    b_t(g) and n_t(g) are the probabilities that frames 1..t collapse to g and end in a blank or in g's last token, and
    p_t(v | l) is the distribution of frame t after the emitted label l (the root, while nothing is emitted):

        e_t(g.c) = p_t(c | last g) * [b_{t-1}(g) + (c != last g) * n_{t-1}(g)]      frame t is the first c
        n_t(g.c) = p_t(c | c) * n_{t-1}(g.c) + e_t(g.c)
        b_t(g)   = p_t(blank | last g) * (b_{t-1}(g) + n_{t-1}(g))

    The first label can always enter, even if it equals the root, because nothing has been emitted before it. If equal
    neighbours are not merged, every label can enter and none can stay: n_t(g.c) = e_t(g.c) without the condition.

    Args:
        enter: (A, T, U) log p_t(y_u | y_{u-1}), where y_0 is the root.
        stay: (A, T, U) log p_t(y_u | y_u). Equal to ``enter`` if the distribution depends only on the frame.
        blank: (A, T, U + 1) log p_t(blank | y_u), u = 0..U; or (A, T, 1) if it depends only on the frame.
        labels: (A, U) token ids; only their equality with the previous label matters.
        merge_repeats: As in `collapse`.

    Returns:
        With time first, ``entered`` (T, A, U), log e_t for t = 1..T; ``blank_end`` and ``label_end`` (T + 1, A, U + 1),
        log b_t and log n_t for t = 0..T. States that no alignment reaches are at most ``IMPOSSIBLE`` / 2.
    """
    barred = enter.new_zeros(labels.shape)
    if merge_repeats:
        barred[:, 1:].masked_fill_(labels[:, 1:] == labels[:, :-1], IMPOSSIBLE)
    else:
        stay = torch.full_like(stay, IMPOSSIBLE)
    blank = blank.expand(-1, -1, labels.shape[1] + 1)
    return _Recursion.apply(*(x.transpose(0, 1).contiguous() for x in (enter, stay, blank)), barred)


def prefix_log_probs(
    enter: Tensor, stay: Tensor, blank: Tensor, labels: Tensor, merge_repeats: bool = True
) -> tuple[Tensor, Tensor]:
    """Log-probabilities that T frames collapse to, or begin with, each prefix of a label.

    P(text = g) = b_T(g) + n_T(g) and P(text begins with g.c) = sum_t e_t(g.c), with the arguments and the recursion of
    `states`.

    Returns:
        ``exact`` (A, U + 1), log P(the text is y_1..y_u) for u = 0..U, and ``prefix`` (A, U), log P(the text begins
        with y_1..y_u) for u = 1..U. Prefixes that no alignment reaches are at most ``IMPOSSIBLE`` / 2.
    """
    return exact_and_prefix(*states(enter, stay, blank, labels, merge_repeats))


def exact_and_prefix(entered: Tensor, blank_end: Tensor, label_end: Tensor) -> tuple[Tensor, Tensor]:
    """``exact`` and ``prefix`` of `prefix_log_probs`, from the result of `states`."""
    return torch.logaddexp(blank_end[-1], label_end[-1]), entered.logsumexp(0)


def expected_acceptance(prefix: Tensor, valid: Tensor | None = None) -> Tensor:
    """Average number of accepted labels when a sampled draft is verified: sum_u P(text begins with y_1..y_u).

    Args:
        prefix: (A, U) log-probabilities of the prefixes.
        valid: (A, U) bool, a leading run; all of them by default.

    Returns:
        (A,), between 0 and U.
    """
    probabilities = prefix.exp()
    return (probabilities if valid is None else torch.where(valid, probabilities, 0.0)).sum(-1)
