"""The candidate tokens of each draft and their probabilities, copied to the host at once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.learned.layers.markov import Markov


def tables(
    logits: Tensor, roots: Tensor, vocab_size: int, num_candidates: int, markov: Markov | None = None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The candidates of each draft, the tokens that are most probable in any frame, with their probabilities.

    Args:
        logits: (A, T, W) logits of the frames; W is V, or V + 1 with the blank last.
        roots: (A,) root tokens.
        vocab_size: V.
        num_candidates: C.
        markov: Bias on the W logits given the previous token; none by default.

    Returns:
        For each anchor ``probs`` (L, T, C), or (L, T, C + 1) with the blank last, and ``tokens`` (C,). L is 1 without a
        bias, else C + 1: row l is the distribution after candidate l, row C the distribution after the root.
    """
    probs = logits.softmax(-1)
    best = probs[..., :vocab_size].amax(1).topk(min(num_candidates, vocab_size), dim=-1).indices  # (A, C), distinct
    symbols = pad(best, (0, logits.shape[-1] - vocab_size), value=vocab_size)
    if markov is None:
        picked = probs.gather(-1, symbols[:, None].expand(-1, probs.shape[1], -1))[:, None]
    else:
        picked = torch.stack([_biased(markov, *each) for each in zip(probs, best, symbols, roots, strict=True)])
    num_tokens = best.shape[1]
    host = torch.cat([picked.flatten(1), best], dim=1).cpu().numpy()  # float32 holds token ids exactly
    return [(row[:-num_tokens].reshape(picked.shape[1:]), row[-num_tokens:].astype(np.int64)) for row in host]


def _biased(markov: Markov, probs: Tensor, best: Tensor, symbols: Tensor, root: Tensor) -> Tensor:
    """Probabilities (C + 1, T, C + e) of the symbols (C + e,), after each candidate (C,) and after the root.

    softmax(z + B) is softmax(z) * exp(B), normalised again, so the softmax over frames (T, W) is computed only once.
    """
    with torch.autocast(probs.device.type, enabled=False):  # bfloat16 is too coarse for a sum over V
        bias = markov(torch.cat([best, root[None]])).to(probs.dtype)  # (L, W)
        factors = (bias - bias.amax(-1, keepdim=True)).exp()
        total = factors @ probs.T  # (L, T)
    return factors[:, symbols][:, None] * probs[:, symbols] / total[..., None]
