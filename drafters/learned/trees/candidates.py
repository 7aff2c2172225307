"""The candidate tokens of each draft and their probabilities, copied to the host at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.learned.layers.markov import Markov
from drafters.learned.trees.best_first import Bias

NUM_CONTEXTS = 4
"""Tokens after which each frame's distribution counts in the choice of candidates; 8 choose no better."""


@dataclass(frozen=True)
class Candidates:
    """The tokens that may enter one draft's tree, on the host.

    Args:
        tokens: (C,) token ids, distinct, the best first.
        probs: (T, C), or (T, C + 1) with the blank last: their probabilities in each frame, without the bias.
        bias: What the previous token makes of them; None without a bias.
    """

    tokens: np.ndarray
    probs: np.ndarray
    bias: Bias | None = None


def choose(
    logits: Tensor, roots: Tensor, vocab_size: int, num_candidates: int, markov: Markov | None = None
) -> list[Candidates]:
    """The candidates of each draft with their probabilities.

    Without a bias they are the tokens that are most probable in any frame. With one they are those that the draft is
    expected to show most often (`expected_frames`): a token may be improbable in every frame and yet be certain after
    the token before it.

    Args:
        logits: (A, T, W) logits of the frames; W is V, or V + 1 with the blank last.
        roots: (A,) root tokens.
        vocab_size: V.
        num_candidates: C.
        markov: Bias on the W logits given the previous token; none by default.
    """
    num_candidates, probs = min(num_candidates, vocab_size), logits.softmax(-1)
    num_frames, num_symbols = logits.shape[1], num_candidates + logits.shape[-1] - vocab_size
    sizes = [num_candidates, num_frames * num_symbols]
    with torch.autocast(logits.device.type, enabled=False):  # bfloat16 is too coarse for a sum over V
        if markov is None:
            best = probs[..., :vocab_size].amax(1).topk(num_candidates).indices  # (A, C), distinct
            parts = [best, probs.gather(-1, _symbols(best, logits, vocab_size)[:, None].expand(-1, num_frames, -1))]
        else:
            expected = torch.stack(
                [expected_frames(frames, root, vocab_size, markov) for frames, root in zip(logits, roots, strict=True)]
            )
            best = expected.topk(num_candidates).indices
            symbols = _symbols(best, logits, vocab_size)
            parts = [best, probs.gather(-1, symbols[:, None].expand(-1, num_frames, -1))]
            parts += _biases(probs, torch.cat([best, roots[:, None]], 1), symbols, markov)
            sizes += [(num_candidates + 1) * num_symbols, (num_candidates + 1) * num_frames]
    # One copy for all; float32 holds token ids exactly.
    host = torch.cat([part.flatten(1).to(probs.dtype) for part in parts], dim=1).cpu().numpy()
    return [_candidates(np.split(row, np.cumsum(sizes)[:-1]), num_frames) for row in host]


def expected_frames(
    logits: Tensor, root: Tensor, vocab_size: int, markov: Markov, num_contexts: int = NUM_CONTEXTS
) -> Tensor:
    """The expected number of a draft's frames that show each token: (V,).

    Frame by frame, the distributions after the ``num_contexts`` most probable last tokens are added up, weighted by the
    probability that the token is the last one. A prefix is at most as probable as its last token is expected, so with
    all V contexts no token is missed whose node is more probable than the least expected candidate.

    Args:
        logits: (T, W) logits of the frames; W is V, or V + 1 with the blank last.
        root: () root token.
        vocab_size: V.
        markov: Bias on the W logits given the previous token.
        num_contexts: Last tokens that each frame is conditioned on.
    """
    contexts, weights = root[None], logits.new_ones(1)
    expected = logits.new_zeros(vocab_size)
    for t, frame in enumerate(logits):
        shown = (frame + markov(contexts)).softmax(-1)  # (K, W)
        last = (weights @ shown)[:vocab_size]
        expected += last
        if t + 1 < len(logits):
            if len(frame) > vocab_size:  # after a blank, the last token is the one before it
                last.index_add_(0, contexts, weights * shown[:, vocab_size])
            weights, contexts = last.topk(min(num_contexts, vocab_size))
    return expected


def _symbols(best: Tensor, logits: Tensor, vocab_size: int) -> Tensor:
    """The candidates (A, C), and the blank if there is one."""
    return pad(best, (0, logits.shape[-1] - vocab_size), value=vocab_size)


def _biases(probs: Tensor, previous: Tensor, symbols: Tensor, markov: Markov) -> list[Tensor]:
    """``factors`` (A, C + 1, C + e) and ``scales`` (A, C + 1, T) of `Bias` for the tokens before (A, C + 1).

    softmax(z + B) is softmax(z) * exp(B), normalised again, so the softmax over frames (A, T, W) is computed only once,
    and no (C + 1, T, C) table is. One draft at a time: (C + 1, W) numbers are enough at once.
    """
    factors, scales = [], []
    for frames, tokens, columns in zip(probs, previous, symbols, strict=True):
        all_factors = markov(tokens).to(frames.dtype).softmax(-1)  # (C + 1, W), each row up to a constant
        factors.append(all_factors[:, columns])
        scales.append((all_factors @ frames.T).clamp(min=torch.finfo(frames.dtype).tiny).reciprocal())
    return [torch.stack(factors), torch.stack(scales)]


def _candidates(parts: list[np.ndarray], num_frames: int) -> Candidates:
    tokens, probs, *bias = parts
    if not bias:
        return Candidates(tokens.astype(np.int64), probs.reshape(num_frames, -1))
    rows = len(tokens) + 1
    return Candidates(
        tokens.astype(np.int64), probs.reshape(num_frames, -1), Bias(*(part.reshape(rows, -1) for part in bias))
    )
