"""The mathematics of CTC in plain torch: the oracle of the fast loss and the search, and the exact q of drawn drafts.

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

The first token can enter even if it equals the root, because nothing is emitted before it. If equal neighbours are not
merged (selfless CTC, arXiv 2110.03098), every token can enter from n and none stays: n_t(g.c) = enter_t(g.c).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def collapse(frames: Tensor, blank: int, merge_repeats: bool = True) -> list[int]:
    """Merge repeated frames, then drop blanks (the CTC paper's beta inverse, section 2.3); or only drop blanks.

    >>> collapse(torch.tensor([7, 7, 0, 7, 5]), blank=0)
    [7, 7, 5]
    >>> collapse(torch.tensor([7, 7, 0, 7, 5]), blank=0, merge_repeats=False)
    [7, 7, 7, 5]
    """
    kept = frames.unique_consecutive() if merge_repeats else frames
    return [token for token in kept.tolist() if token != blank]


class FrameDistributions:
    """p_t(v | l) = softmax_v(z_t(v) + B[l, v]), the distribution of frame t given the last emitted token l.

    The logits z_t (T, V + 1) have the blank last; the biases B[l_g, :] (G, V + 1) are those after the last tokens of G
    texts, or None if B is 0. The softmax of a sum is the product of two factors divided by their inner product, so
    (G, T, V) is never stored. All is computed in float64: the probability of a text is a product over all frames.
    """

    def __init__(self, logits: Tensor, biases: Tensor | None = None) -> None:
        logits = logits.double()
        self._bias: Tensor | None = None
        if biases is None:
            self._frame = logits.softmax(-1)
            return
        biases = biases.double()
        self._frame = (logits - logits.amax(-1, keepdim=True)).exp()  # (T, V + 1)
        self._bias = (biases - biases.amax(-1, keepdim=True)).exp()  # (G, V + 1)
        self._total = self._bias @ self._frame.T  # (G, T)

    @property
    def num_frames(self) -> int:
        return len(self._frame)

    @property
    def blank(self) -> int:
        """Index of the blank, V."""
        return self._frame.shape[1] - 1

    def at(self, texts: Tensor, symbols: Tensor) -> Tensor:
        """p_t(symbol | last token of the text) for N pairs of a text's index and a symbol: (N, T)."""
        probs = self._frame[:, symbols].T
        if self._bias is None:
            return probs
        return probs * self._bias[texts, symbols][:, None] / self._total[texts]

    def mixed(self, weights: Tensor) -> Tensor:
        """sum_t w_t(g) p_t(v | last token of g) for weights (G, T): (G, V + 1), as one matrix product."""
        if self._bias is None:
            return weights @ self._frame
        return (weights / self._total) @ self._frame * self._bias


@dataclass(frozen=True)
class Texts:
    """How the frames spell each of G texts."""

    frames: FrameDistributions
    tokens: Tensor  # (G,) last token of each text; that of the empty text is the root
    blank_end: Tensor  # (G, T + 1) b_t for t = 0..T
    label_end: Tensor  # (G, T + 1) n_t
    prefix: Tensor  # (G,) P(the text begins with g)
    merge_repeats: bool

    def next_token_probs(self) -> Tensor:
        """q(c | g) of every token c, (G, V)."""
        blank_end, label_end = self.blank_end[:, :-1], self.label_end[:, :-1]
        begins = self.frames.mixed(blank_end + label_end)
        if self.merge_repeats:  # then a token is repeated only after a blank
            own = torch.arange(len(begins), device=begins.device)
            begins[own, self.tokens] = (self.frames.at(own, self.tokens) * blank_end).sum(-1)
        return begins[:, :-1] / self.prefix[:, None]


def spell(frames: FrameDistributions, tokens: Tensor, parents: Tensor, merge_repeats: bool = True) -> Texts:
    """Run the recursion for G texts at once; the frames have the biases of these texts, if there are any.

    Takes the last token of each text (G,), and the index (G,) of each text without its last token. Text 0 is the empty
    one: its token is the root, and its parent is ignored.
    """
    own = torch.arange(len(tokens), device=tokens.device)
    parents = parents.clamp(min=0)
    enter = frames.at(parents, tokens)  # (G, T): p_t(c | l)
    enter[0] = 0.0
    stay = frames.at(own, tokens)  # p_t(c | c)
    blank = frames.at(own, torch.full_like(tokens, frames.blank))
    if merge_repeats:
        enters_from_label = (tokens != tokens[parents]).to(enter)
    else:
        stay, enters_from_label = torch.zeros_like(stay), torch.ones_like(enter[:, 0])
    blank_end, label_end = enter.new_zeros(2, frames.num_frames + 1, len(tokens))
    blank_end[0, 0] = 1.0
    prefix = enter.new_zeros(len(tokens))
    for t in range(frames.num_frames):
        b, n = blank_end[t], label_end[t]
        entering = enter[:, t] * (b[parents] + enters_from_label * n[parents])
        prefix = prefix + entering
        label_end[t + 1] = stay[:, t] * n + entering
        blank_end[t + 1] = blank[:, t] * (b + n)
    prefix[0] = 1.0
    return Texts(frames, tokens, blank_end.T, label_end.T, prefix, merge_repeats)
