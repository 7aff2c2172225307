"""The exact distribution of the text that CTC frames collapse to: the next token after a prefix, and stopping there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class FrameDistributions:
    """p_t(v | l) = softmax_v(z_t(v) + B[l, v]), the distribution of frame t given the last emitted token l.

    The softmax of a sum is the product of two factors divided by their inner product, so (G, T, V) is never stored. All
    is computed in float64, because the probability of a prefix is a product over all frames. The logits of a frame and
    the biases of a token may each span several hundred.

    Args:
        logits: (T, V + 1) z_t, the blank last.
        biases: (G, V + 1) B[l_g, :] for the last token of each of G prefixes; without them, frames are independent of
            the emitted tokens.
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

    def at(self, prefixes: Tensor, symbols: Tensor) -> Tensor:
        """p_t(symbol | last token of the prefix) for N pairs of a prefix index and a symbol: (N, T)."""
        probs = self._frame[:, symbols].T
        if self._bias is None:
            return probs
        return probs * self._bias[prefixes, symbols][:, None] / self._total[prefixes]

    def mixed(self, weights: Tensor) -> Tensor:
        """sum_t w_t(g) p_t(v | last token of g) for weights (G, T): (G, V + 1), as one matrix product."""
        if self._bias is None:
            return weights @ self._frame
        return (weights / self._total) @ self._frame * self._bias


@dataclass(frozen=True)
class Prefixes:
    """How the frames spell each of G prefixes (Graves 2006, section 4.1).

    Args:
        tokens: (G,) last token of each prefix; that of the empty prefix is the root.
        blank_end: (G, T + 1) b_t, probability that frames 1..t collapse to the prefix and end in a blank, t = 0..T.
        label_end: (G, T + 1) n_t, probability that they collapse to the prefix and end in its last token.
        probs: (G,) P(the text begins with the prefix).
        merge_repeats: As in `alignment.collapse`.
    """

    tokens: Tensor
    blank_end: Tensor
    label_end: Tensor
    probs: Tensor
    merge_repeats: bool = True


def spell(frames: FrameDistributions, tokens: Tensor, parents: Tensor, merge_repeats: bool = True) -> Prefixes:
    """Run the prefix recursion for all prefixes at once. With l the last token of g,

        enter_t(g.c) = p_t(c | l) * [b_{t-1}(g) + (c != l) * n_{t-1}(g)]
        n_t(g.c)     = p_t(c | c) * n_{t-1}(g.c) + enter_t(g.c)
        b_t(g)       = p_t(blank | l) * (b_{t-1}(g) + n_{t-1}(g))
        P(text begins with g.c) = sum_t enter_t(g.c)

    Nothing is emitted in the empty prefix, so its l is the root, and the first token can enter even if it equals the
    root. If equal neighbours are not merged, every token can enter from n, and n_t(g.c) = enter_t(g.c).

    Args:
        frames: Distributions of the frames; with biases, the biases of these prefixes.
        tokens: (G,) last tokens. Prefix 0 is the empty one, and its token is the root, or V if that cannot be drafted.
        parents: (G,) index of each prefix without its last token; that of prefix 0 is ignored.
        merge_repeats: As in `alignment.collapse`.
    """
    own = torch.arange(len(tokens), device=tokens.device)
    parents = parents.clamp(min=0)
    enter = frames.at(parents, tokens)  # (G, T)
    enter[0] = 0.0
    stay = frames.at(own, tokens)
    blank = frames.at(own, torch.full_like(tokens, frames.blank))
    if merge_repeats:
        enters_from_label = (tokens != tokens[parents]).to(enter)
    else:
        stay, enters_from_label = torch.zeros_like(stay), torch.ones_like(enter[:, 0])

    blank_end, label_end = enter.new_zeros(2, frames.num_frames + 1, len(tokens))
    blank_end[0, 0] = 1.0
    probs = enter.new_zeros(len(tokens))
    for t in range(frames.num_frames):
        b, n = blank_end[t], label_end[t]
        entering = enter[:, t] * (b[parents] + enters_from_label * n[parents])
        probs = probs + entering
        label_end[t + 1] = stay[:, t] * n + entering
        blank_end[t + 1] = blank[:, t] * (b + n)
    probs[0] = 1.0
    return Prefixes(tokens, blank_end.T, label_end.T, probs, merge_repeats)


def next_token_distribution(frames: FrameDistributions, prefixes: Prefixes) -> Tensor:
    """q(c | g) = P(text begins with g.c) / P(text begins with g) for every token c: (G, V), summing to 1 - stop(g)."""
    blank_end, label_end = prefixes.blank_end[:, :-1], prefixes.label_end[:, :-1]
    begins = frames.mixed(blank_end + label_end)
    if prefixes.merge_repeats:  # then a token is repeated only after a blank
        own = torch.arange(len(begins), device=begins.device)
        begins[own, prefixes.tokens] = (frames.at(own, prefixes.tokens) * blank_end).sum(-1)
    return begins[:, :-1] / prefixes.probs[:, None]


def stop_probability(prefixes: Prefixes) -> Tensor:
    """stop(g) = P(the text is g) / P(the text begins with g) = (b_T + n_T)(g) / P(text begins with g): (G,)."""
    return (prefixes.blank_end[:, -1] + prefixes.label_end[:, -1]) / prefixes.probs
