"""The few tokens of each draft that may enter its tree, and their probabilities, on the host after one copy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.learned.layers.markov import Markov


def tables(
    logits: Tensor, roots: Tensor, vocab_size: int, num_candidates: int, markov: Markov | None = None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each draft its candidates, the tokens that are most probable in any frame, and their laws.

    Args:
        logits: (A, T, W) of frames; W is V, or V + 1 with the blank last.
        roots: (A,) tokens.
        vocab_size: V.
        num_candidates: C.
        markov: Bias on the W logits given the token before.

    Returns:
        Of each anchor ``probs`` (L, T, C), or (L, T, C + 1) with the blank last, and ``tokens`` (C,). L is 1 without
        a bias; with one it is C + 1: row l is the law after candidate l, row C that after the root.
    """
    probs = logits.softmax(-1)
    best = probs[..., :vocab_size].amax(1).topk(min(num_candidates, vocab_size), dim=-1).indices  # (A, C), distinct
    symbols = pad(best, (0, logits.shape[-1] - vocab_size), value=vocab_size)
    if markov is None:
        picked = probs.gather(-1, symbols[:, None].expand(-1, probs.shape[1], -1))[:, None]
    else:
        picked = torch.stack([_after(markov, *each) for each in zip(probs, best, symbols, roots, strict=True)])
    num_tokens = best.shape[1]
    host = torch.cat([picked.flatten(1), best], dim=1).cpu().numpy()  # float32 holds token ids exactly
    return [(row[:-num_tokens].reshape(picked.shape[1:]), row[-num_tokens:].astype(np.int64)) for row in host]


def _after(markov: Markov, probs: Tensor, best: Tensor, symbols: Tensor, root: Tensor) -> Tensor:
    """The laws of the frames (T, W) for the symbols (C + e,) after each candidate (C,) and the root: (C + 1, T, C + e).

    softmax(z + B) is softmax(z) * exp(B), normalised anew.
    """
    with torch.autocast(probs.device.type, enabled=False):  # a sum over the vocabulary, not to be made in bfloat16
        bias = markov(torch.cat([best, root[None]])).to(probs.dtype)  # (L, W)
        factors = (bias - bias.amax(-1, keepdim=True)).exp()
        total = factors @ probs.T  # (L, T)
    return factors[:, symbols][:, None] * probs[:, symbols] / total[..., None]
