"""The candidate tokens of each draft and their probabilities, copied to the host at once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.nn.draft_vocabulary import DraftVocabulary
from drafters.nn.markov import Markov
from drafters.trees.search import Bias, Candidates

NUM_CONTEXTS = 4
"""Tokens after which each frame's distribution counts in the choice of candidates; 8 choose no better."""
NUM_FACTORS = 1 << 23
"""Numbers of the bias that are computed at once, of as many drafts as that allows; 32 MB in float32."""


def choose(
    logits: Tensor,
    roots: Tensor,
    vocab_size: int,
    num_candidates: int,
    markov: Markov | None = None,
    vocabulary: DraftVocabulary | None = None,
) -> Candidates:
    """The C candidates of each draft with their probabilities.

    Without a bias they are the tokens that are most probable in any frame. With one they are those that the draft is
    expected to show most often (`expected_frames`): a token may be improbable in every frame and yet be certain after
    the token before it.

    Args:
        logits: (A, T, W) logits of the frames; W is V, or V + 1 with the blank last.
        roots: (A,) root tokens.
        vocab_size: V, or the size V' of the draft vocabulary.
        num_candidates: C.
        markov: Bias on the W logits given the previous token.
        vocabulary: The tokens that the columns of the logits stand for; None for all.
    """
    probs, num_frames = logits.softmax(-1), logits.shape[1]
    num_candidates = min(num_candidates, vocab_size)
    if markov is None:
        best = probs[..., :vocab_size].amax(1).topk(num_candidates).indices  # (A, C), distinct
    else:
        best = expected_frames(logits, roots, vocab_size, markov, vocabulary=vocabulary).topk(num_candidates).indices
    tokens = best if vocabulary is None else vocabulary.tokens[best]
    symbols = pad(best, (0, logits.shape[-1] - vocab_size), value=vocab_size)  # and the blank, if there is one
    parts = [tokens, probs.gather(-1, symbols[:, None].expand(-1, num_frames, -1))]
    if markov is not None:
        parts += _biases(probs, torch.cat([tokens, roots[:, None]], 1), symbols, markov)
    tokens_on_host, shown, *bias = on_host(*parts)
    blank = shown[..., -1] if logits.shape[-1] > vocab_size else None
    return Candidates(
        tokens_on_host.astype(np.int64), shown[..., :num_candidates], blank, Bias(*bias) if bias else None
    )


def expected_frames(
    logits: Tensor,
    roots: Tensor,
    vocab_size: int,
    markov: Markov,
    num_contexts: int = NUM_CONTEXTS,
    vocabulary: DraftVocabulary | None = None,
) -> Tensor:
    """The expected number of each draft's frames that show each token: (A, V).

    Frame by frame, the distributions after the ``num_contexts`` most probable last tokens are added up, weighted by the
    probability that the token is the last one. A prefix is at most as probable as its last token is expected, so with
    all V contexts no token is missed whose node is more probable than the least expected candidate. The arguments are
    those of `choose`.
    """
    num_frames, num_symbols = logits.shape[1:]
    contexts, weights = roots[:, None], logits.new_ones(len(roots), 1)  # (A, K)
    if vocabulary is not None:  # contexts are columns, and V' is a root that cannot be drafted
        contexts = vocabulary.columns[contexts]
    expected = logits.new_zeros(len(roots), vocab_size)
    with torch.autocast(logits.device.type, enabled=False):  # bfloat16 is too coarse for a sum over V
        for t in range(num_frames):
            tokens = contexts if vocabulary is None else vocabulary.tokens_at(contexts, roots[:, None])
            shown = (logits[:, t, None] + markov(tokens)).softmax(-1)  # (A, K, W)
            last = (weights[:, None] @ shown)[:, 0, :vocab_size]
            expected += last
            if t + 1 < num_frames:
                last = last if vocabulary is None else pad(last, (0, 1))
                if num_symbols > vocab_size:  # after a blank, the last token is the one before it
                    last.scatter_add_(1, contexts, weights * shown[..., vocab_size])
                weights, contexts = last.topk(min(num_contexts, last.shape[1]))
    return expected


def _biases(probs: Tensor, previous: Tensor, symbols: Tensor, markov: Markov) -> list[Tensor]:
    """``factors`` (A, C + 1, C + e) and ``scales`` (A, C + 1, T) of `Bias` for the tokens before (A, C + 1).

    softmax(z + B) is softmax(z) * exp(B), normalised again, so the softmax over frames (A, T, W) is computed only once,
    and no (C + 1, T, C) table is. The (C + 1, W) factors are those of a few drafts at once.
    """
    factors, scales = [], []
    at_once = max(1, NUM_FACTORS // (previous.shape[1] * probs.shape[-1]))
    with torch.autocast(probs.device.type, enabled=False):
        for frames, tokens, columns in zip(*(each.split(at_once) for each in (probs, previous, symbols)), strict=True):
            all_factors = markov(tokens).to(frames.dtype).softmax(-1)  # (a, C + 1, W), each row up to a constant
            factors.append(all_factors.gather(-1, columns[:, None].expand(-1, tokens.shape[1], -1)))
            scales.append((all_factors @ frames.mT).clamp(min=torch.finfo(frames.dtype).tiny).reciprocal())
    return [torch.cat(factors), torch.cat(scales)]


def on_host(*parts: Tensor) -> list[np.ndarray]:
    """Copy tensors to the host at once, in the dtype of the second; float32 holds token ids exactly."""
    flat = torch.cat([part.flatten().to(parts[1].dtype) for part in parts]).cpu().numpy()
    ends = np.cumsum([part.numel() for part in parts])[:-1]
    return [numbers.reshape(part.shape) for numbers, part in zip(np.split(flat, ends), parts, strict=True)]
