"""The most probable CTC chains of a batch of drafts with a bias between neighbouring tokens, on the device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.nn.markov import Markov
from drafters.trees.chains import Chains


def chains(
    logits: Tensor, roots: Tensor, candidates: Tensor, markov: Markov, num_tokens: int, merge_repeats: bool = True
) -> Chains:
    """What `prefix_search.chain` finds among the candidates, by operations of fixed shape and without a copy.

    The recursion is the one of `prefix_search.search`. Its two sums over frames are triangular products here, so a
    token takes a fixed number of operations, however many frames there are. It was not run on a GPU yet.

    Args:
        logits: (A, T, V + 1) logits of the frames, the blank last.
        roots: (A,) root tokens.
        candidates: (A, C) tokens that may enter a chain, distinct in each row.
        markov: Bias on the logits given the previous token.
        num_tokens: M, at least 1.
        merge_repeats: As in `alignment.collapse`.
    """
    num_frames, vocab_size = logits.shape[1], logits.shape[2] - 1
    every_symbol = logits.softmax(-1)
    symbols = pad(candidates, (0, 1), value=vocab_size)  # and the blank
    frames = every_symbol.gather(-1, symbols[:, None].expand(-1, num_frames, -1)).double()  # (A, T, C + 1)
    tiny = torch.finfo(logits.dtype).tiny

    def bias_after(last: Tensor) -> tuple[Tensor, Tensor]:
        """The factors (A, C + 1) and scales (A, T) of `best_first.Bias` in the row of a token (A,)."""
        factors = markov(last).to(logits.dtype).softmax(-1)
        scales = (every_symbol @ factors[..., None])[..., 0].clamp(min=tiny).reciprocal()
        return factors.gather(1, symbols).double(), scales.double()

    factors, scales = bias_after(roots)
    blank_end = pad((frames[..., -1] * factors[:, -1:] * scales).cumprod(-1), (1, 0), value=1.0)  # b_t, t = 0..T
    label_end = torch.zeros_like(blank_end)  # n_t
    scores = _child_probs(frames, factors, scales, blank_end + label_end).clamp(max=1.0)
    before = torch.full_like(roots[:, None], -1)
    tokens, probs = [], []
    while True:
        taken = scores.argmax(-1, keepdim=True)  # (A, 1)
        path, last = scores.gather(1, taken), candidates.gather(1, taken)[:, 0]
        tokens.append(last)
        probs.append(path[:, 0])
        if len(tokens) == num_tokens:
            return Chains(torch.stack(tokens, 1), torch.stack(probs, 1))
        own = frames.gather(-1, taken[:, None].expand(-1, num_frames, 1))[..., 0]  # (A, T)
        # Where equal neighbours are merged, a repetition of the token before has to enter from a blank.
        source = blank_end + (label_end.masked_fill(taken == before, 0.0) if merge_repeats else label_end)
        enter = source[:, :-1] * own * factors.gather(1, taken) * scales
        factors, scales = bias_after(last)
        none = frames[..., -1] * factors[:, -1:] * scales
        stays = own * factors.gather(1, taken) * scales
        label_end = _accumulate(stays, enter) if merge_repeats else pad(enter, (1, 0))
        blank_end = _accumulate(none, label_end[:, :-1] * none)
        scores = _child_probs(frames, factors, scales, blank_end + label_end)
        if merge_repeats:
            scores = scores.scatter(1, taken, (blank_end[:, :-1] * stays).sum(-1, keepdim=True))
        scores, before = scores.minimum(path), taken  # rounding must not lift a child above its parent


def _child_probs(frames: Tensor, factors: Tensor, scales: Tensor, source: Tensor) -> Tensor:
    """Probability (A, C) of the prefix with each candidate appended: the sum over the frame that emits it first."""
    return ((source[:, :-1] * scales)[:, None] @ frames[..., :-1])[:, 0] * factors[:, :-1]


def _accumulate(keep: Tensor, add: Tensor) -> Tensor:
    """x_t of x_0 = 0 and x_{t+1} = x_t * keep_t + add_t, from (A, T) to (A, T + 1)."""
    later = torch.ones(keep.shape[1], keep.shape[1], dtype=torch.bool, device=keep.device).triu()
    products = torch.where(later.triu(1), keep[:, None], 1.0).cumprod(-1)  # of keep after s up to t, (A, T, T)
    return pad((add[:, None] @ products.masked_fill(~later, 0.0))[:, 0], (1, 0))
