"""CTC alignments: the map from frames to text, and the probability of a text summed over its alignments."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IMPOSSIBLE = -1e30
"""Log-probability of what cannot happen; finite, so that differences of two of them stay finite."""


def collapse(frames: Tensor, blank: int) -> list[int]:
    """Merge repeated frames, then drop blanks (the CTC paper's beta inverse, section 2.3).

    >>> collapse(torch.tensor([7, 7, 0, 7, 5]), blank=0)
    [7, 7, 5]
    """
    return [token for token in frames.unique_consecutive().tolist() if token != blank]


def is_possible(log_probs: Tensor) -> Tensor:
    """True where some alignment reaches what the log-probability is of."""
    return log_probs > IMPOSSIBLE / 2


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """Share that a log-probability has in a sum, nothing where the sum is of impossible things."""
    return torch.where(is_possible(whole), (part - whole).exp(), 0.0)


class _Recursion(torch.autograd.Function):
    """The forward recursion in log space, and its gradient from the saved states.

    Every log-add sends its gradient back by the shares of its two sides. The shares of all frames are computed at
    once; what is left for the loop over frames are a few products. This holds for upstream gradients of any sign.
    """

    @staticmethod
    def forward(ctx, enter: Tensor, stay: Tensor, blank: Tensor, barred: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        num_frames, num_anchors, num_labels = enter.shape
        blank_end = enter.new_full((num_frames + 1, num_anchors, num_labels + 1), IMPOSSIBLE)
        label_end = torch.full_like(blank_end, IMPOSSIBLE)  # column 0, the empty text, ends in no label
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
        of_entering, of_staying = _ratio(entered, after), _ratio(stay + before[..., 1:], after)
        from_label, from_blank = _ratio(passing, source), _ratio(blank_end[:-1, :, :-1], source)
        label_share, blank_share = _ratio(before, either), _ratio(blank_end[:-1], either)
        d_stay, d_blank = torch.empty_like(stay), torch.empty_like(either)
        d_entered, d_labels, d_blanks = d_entered.clone(), d_label_end[-1].clone(), d_blank_end[-1]
        for t in reversed(range(len(stay))):
            d_blank[t] = d_blanks
            d_entered[t].addcmul_(d_labels[:, 1:], of_entering[t])
            torch.mul(d_labels[:, 1:], of_staying[t], out=d_stay[t])
            d_labels = torch.addcmul(d_label_end[t], d_blanks, label_share[t])
            d_labels[:, 1:] += d_stay[t]
            d_labels[:, :-1].addcmul_(d_entered[t], from_label[t])
            d_blanks = torch.addcmul(d_blank_end[t], d_blanks, blank_share[t])
            d_blanks[:, :-1].addcmul_(d_entered[t], from_blank[t])
        return d_entered, d_stay, d_blank, None


def states(enter: Tensor, stay: Tensor, blank: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of where an alignment stands after each frame (Graves 2006, section 4.1).

    With b_t(g) and n_t(g) the probability that frames 1..t collapse to g and end in blank or in g's last token, and
    p_t(v | l) the law of frame t after the emitted label l (the root, while nothing is emitted):

        e_t(g.c) = p_t(c | last g) * [b_{t-1}(g) + (c != last g) * n_{t-1}(g)]      frame t is the first c
        n_t(g.c) = p_t(c | c) * n_{t-1}(g.c) + e_t(g.c)
        b_t(g)   = p_t(blank | last g) * (b_{t-1}(g) + n_{t-1}(g))

    The first label always enters, also where it equals the root: nothing has been emitted before it.

    Args:
        enter: (A, T, U) log p_t(y_u | y_{u-1}), where y_0 is the root.
        stay: (A, T, U) log p_t(y_u | y_u). The same as ``enter`` where the law depends on the frame alone.
        blank: (A, T, U + 1) log p_t(blank | y_u), u = 0..U; or (A, T, 1) where it depends on the frame alone.
        labels: (A, U) token ids; only their equality to the left neighbour matters.

    Returns:
        Time first: ``entered`` (T, A, U), log e_t for t = 1..T; ``blank_end`` and ``label_end`` (T + 1, A, U + 1),
        log b_t and log n_t for t = 0..T. What no alignment reaches is at most ``IMPOSSIBLE`` / 2.
    """
    barred = enter.new_zeros(labels.shape)
    barred[:, 1:].masked_fill_(labels[:, 1:] == labels[:, :-1], IMPOSSIBLE)
    blank = blank.expand(-1, -1, labels.shape[1] + 1)
    return _Recursion.apply(*(x.transpose(0, 1).contiguous() for x in (enter, stay, blank)), barred)


def prefix_log_probs(enter: Tensor, stay: Tensor, blank: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities that T frames collapse to, or begin with, each prefix of a label.

    P(text = g) = b_T(g) + n_T(g) and P(text begins with g.c) = sum_t e_t(g.c), by the recursion and the arguments
    of ``states``.

    Returns:
        ``exact`` (A, U + 1), log P(the text is y_1..y_u) for u = 0..U, and ``prefix`` (A, U), log P(the text
        begins with y_1..y_u) for u = 1..U. What no alignment reaches is at most ``IMPOSSIBLE`` / 2.
    """
    return summed(*states(enter, stay, blank, labels))


def summed(entered: Tensor, blank_end: Tensor, label_end: Tensor) -> tuple[Tensor, Tensor]:
    """``exact`` and ``prefix`` from what ``states`` gave."""
    return torch.logaddexp(blank_end[-1], label_end[-1]), entered.logsumexp(0)


def expected_acceptance(prefix: Tensor, valid: Tensor | None = None) -> Tensor:
    """Labels accepted on average when a text drawn from the draft is verified: sum_u P(text begins with y_1..y_u).

    Args:
        prefix: (A, U) log-probabilities of the prefixes. valid: (A, U) bool, a leading run; all of them if None.

    Returns:
        (A,), between 0 and U.
    """
    probabilities = prefix.exp()
    return (probabilities if valid is None else torch.where(valid, probabilities, 0.0)).sum(-1)
