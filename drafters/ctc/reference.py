"""The mathematics of CTC in plain torch, written to be read: what the fast loss and the search must equal.

T frames each show a token or the blank, and collapse to a text. p_t(v | l) is the distribution of frame t while l is
the last token emitted, which is the root at first. For a text g that ends with l, b_t(g) and n_t(g) are the
probabilities that frames 1..t collapse to g and end in a blank or in l (Graves 2006, section 4.1):

    enter_t(g.c) = p_t(c | l) * [b_{t-1}(g) + (c != l) * n_{t-1}(g)]        frame t is the first that shows this c
    n_t(g.c)     = p_t(c | c) * n_{t-1}(g.c) + enter_t(g.c)
    b_t(g)       = p_t(blank | l) * (b_{t-1}(g) + n_{t-1}(g))               b_0 of the empty text is 1, all else is 0

    P(the text is g)             = b_T(g) + n_T(g)
    P(the text begins with g.c)  = sum_t enter_t(g.c)
    q(c | g)                     = P(begins with g.c) / P(begins with g), which sums over c to 1 - stop(g)
    stop(g)                      = P(is g) / P(begins with g)

The first token can enter even if it equals the root, because nothing is emitted before it.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor


def collapse(frames: Tensor, blank: int) -> list[int]:
    """Merge repeated frames, then drop blanks (the CTC paper's beta inverse, section 2.3).

    >>> collapse(torch.tensor([7, 7, 0, 7, 5]), blank=0)
    [7, 7, 5]
    """
    return [token for token in frames.unique_consecutive().tolist() if token != blank]


def text_probabilities(probs: Tensor, root: int, text: Sequence[int]) -> tuple[Tensor, Tensor]:
    """P(the text begins with ``text``) and P(it is ``text``), scalars.

    ``probs`` (T, V, V + 1) are p_t(v | l) at [t, l, v], with the blank as the last symbol.
    """
    num_frames, blank, last = len(probs), probs.shape[-1] - 1, root
    begins = probs.new_ones(())
    ends_in_blank = [begins]  # b_t of the empty text, for t = 0..T
    for t in range(num_frames):
        ends_in_blank.append(probs[t, last, blank] * ends_in_blank[t])
    ends_in_label = [torch.zeros_like(begins)] * (num_frames + 1)  # n_t
    for token in text:
        before = [b + n * (token != last) for b, n in zip(ends_in_blank, ends_in_label, strict=True)]
        entering = [probs[t, last, token] * before[t] for t in range(num_frames)]
        ends_in_blank, ends_in_label = [torch.zeros_like(begins)], [torch.zeros_like(begins)]
        for t in range(num_frames):
            stay = probs[t, token, token] * ends_in_label[t]
            ends_in_blank.append(probs[t, token, blank] * (ends_in_blank[t] + ends_in_label[t]))
            ends_in_label.append(stay + entering[t])
        begins, last = torch.stack(entering).sum(), token
    return begins, ends_in_blank[-1] + ends_in_label[-1]


def plain_loss(
    probs: Tensor,
    roots: Sequence[int],
    labels: Sequence[Sequence[int]],
    objective: Literal["ctc", "prefix"] = "prefix",
    decay: float = 0.9,
) -> Tensor:
    """Mean loss over the anchors that have labels; what `drafters.ctc.loss.ctc_loss` computes, without its shortcuts.

    ``ctc`` is the paper's equation 6, -log P(the text is y_1..y_n) / n. ``prefix`` is the mean of -log P(the text
    begins with y_1..y_u) over u with weights decay^(u-1). Labels that no alignment reaches contribute nothing.
    ``probs`` (A, T, V, V + 1) are as in `text_probabilities`, of each of A anchors.
    """
    losses = []
    for frames, root, label in zip(probs, roots, labels, strict=True):
        if not len(label):
            continue
        ends = [text_probabilities(frames, root, label[: u + 1]) for u in range(len(label))]
        begins = torch.stack([begin for begin, _ in ends])  # (U,) P(the text begins with y_1..y_u)
        weights = decay ** torch.arange(len(label), dtype=begins.dtype) * (begins > 0)
        terms = weights / weights.sum().clamp(min=1e-30) * -begins.clamp(min=1e-300).log()
        whole = ends[-1][1]
        losses.append(terms.sum() if objective == "prefix" else -torch.where(whole > 0, whole, 1.0).log() / len(label))
    return torch.stack(losses).mean()
