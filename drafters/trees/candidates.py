"""The candidate tokens of each draft and their probabilities."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from drafters.nn.draft_vocabulary import DraftVocabulary
from drafters.nn.markov import Markov
from drafters.trees.search import Bias, Candidates

NUM_LIKELY = 512  # tokens that are biased, of which the candidates are chosen
NUM_LAST = 4  # most probable last tokens whose successors each frame counts
NUM_AT_ONCE = 16  # drafts whose candidates are chosen together: of a large vocabulary, 6 MB each


class Symbols(NamedTuple):
    """What the frames of A drafts may show: N likely tokens, the blank if there is one, and the rest.

    The rest stands for all other tokens: it has their probability, and no bias.
    """

    log_probs: Tensor  # (A, T, W) without the bias
    tokens: Tensor  # (A, N + 1) the likely tokens, and behind them the root
    left: Tensor  # (V, R) left factor of the Markov bias
    right: Tensor  # (A, W, R) its right factor
    has_blank: bool

    def left_factors(self, last: Tensor) -> Tensor:
        """The left factors (A, K, R) after tokens that are columns (A, K) of ``tokens``."""
        return embedding(self.tokens.gather(1, last), self.left)


def choose(
    logits: Tensor,
    roots: Tensor,
    vocab_size: int,
    num_candidates: int,
    markov: Markov | None = None,
    vocabulary: DraftVocabulary | None = None,
) -> list[Tensor]:
    """The candidates of each draft, on the device; on the host they are `Candidates`.

    They are tokens (A, C), their probabilities (A, T, C + e), and with a bias the factors and scales of their `Bias`.

    Without a bias they are the tokens that are most probable in any frame. With one a token may be improbable in every
    frame and yet be certain after the token before it. So of the 512 tokens that are most probable in any frame without
    the bias, they are those that the draft is expected to show most often under it (`expected_frames`).

    Args:
        logits: (A, T, W) logits of the frames; W is V, or V + 1 with the blank last.
        roots: (A,) root tokens.
        vocab_size: V, or the size V' of the draft vocabulary.
        num_candidates: C.
        markov: Bias on the W logits given the previous token.
        vocabulary: The tokens that the columns of the logits stand for; None for all.
    """
    if len(logits) > NUM_AT_ONCE:
        few = zip(logits.split(NUM_AT_ONCE), roots.split(NUM_AT_ONCE), strict=True)
        parts = [choose(*each, vocab_size, num_candidates, markov, vocabulary) for each in few]
        return [torch.cat(part) for part in zip(*parts, strict=True)]
    num_candidates, has_blank = min(num_candidates, vocab_size), logits.shape[-1] > vocab_size
    with torch.autocast(logits.device.type, enabled=False):  # bfloat16 is too coarse for a sum over V
        if markov is None:
            probs = logits.softmax(-1)
            best = probs[..., :vocab_size].amax(1).topk(num_candidates).indices  # (A, C), distinct
            columns = pad(best, (0, has_blank), value=vocab_size)
            return [_tokens(best, vocabulary), probs.take_along_dim(columns[:, None], -1)]
        log_probs = logits.log_softmax(-1)
        num_likely = min(vocab_size, max(NUM_LIKELY, num_candidates))
        likely = log_probs[..., :vocab_size].amax(1).topk(num_likely, sorted=False).indices
        tokens, columns = _tokens(likely, vocabulary), pad(likely, (0, has_blank), value=vocab_size)
        log_probs = log_probs.take_along_dim(columns[:, None], -1)
        rest = (1 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(log_probs.dtype).tiny).log()
        log_probs = torch.cat([log_probs, rest], -1)  # (A, T, W)
        left, right = markov.left.to(log_probs.dtype), embedding(columns, markov.right).to(log_probs.dtype)
        symbols = Symbols(log_probs, torch.cat([tokens, roots[:, None]], 1), left, pad(right, (0, 0, 0, 1)), has_blank)
        best = expected_frames(symbols).topk(num_candidates).indices
        probs, columns = log_probs.softmax(-1), pad(best, (0, has_blank), value=num_likely)
        # softmax(z + B) is softmax(z) * exp(B), normalised again.
        bias = symbols.left_factors(pad(best, (0, 1), value=num_likely)) @ symbols.right.mT
        factors = bias.softmax(-1)  # (A, C + 1, W)
        sums = factors @ probs.mT  # (A, C + 1, T)
        scales = sums.clamp(min=torch.finfo(sums.dtype).tiny).reciprocal()
        of_candidates = (part.take_along_dim(columns[:, None], -1) for part in (probs, factors))
        return [tokens.gather(1, best), *of_candidates, scales]


def candidates(parts: Sequence[np.ndarray]) -> Candidates:
    """What `choose` returned, on the host."""
    token_ids, probs, *bias = parts
    num_candidates = token_ids.shape[1]
    blank = probs[..., -1] if probs.shape[-1] > num_candidates else None
    return Candidates(token_ids.astype(np.int64), probs[..., :num_candidates], blank, Bias(*bias) if bias else None)


def _tokens(columns: Tensor, vocabulary: DraftVocabulary | None) -> Tensor:
    """The token ids that columns of the logits stand for."""
    return columns if vocabulary is None else vocabulary.tokens[columns]


def expected_frames(symbols: Symbols) -> Tensor:
    """The expected number of each draft's frames that show each likely token under the bias, (A, N).

    Frame by frame, the distributions p_t(v | l) are summed, weighted by the probability that l is the last token shown.
    The root is l as long as all frames are blank. Of the other l the 4 most probable count, which makes the numbers a
    little too small: with all of them no node would be more probable than its token is expected, so that no token is
    missed whose nodes are more probable than the least expected candidate.
    """
    log_probs, tokens, _, right, has_blank = symbols
    num_tokens = tokens.shape[1] - 1
    root = symbols.left_factors(torch.full_like(tokens[:, :1], num_tokens))  # (A, 1, R)
    below_root = (log_probs + root @ right.mT).softmax(-1)  # (A, T, W) p_t(. | root)
    blanks = below_root[..., num_tokens] if has_blank else torch.zeros_like(below_root[..., 0])
    below_root = below_root * pad(blanks.cumprod(1)[:, :-1], (1, 0), value=1.0)[..., None]
    shown = [below_root[:, :1]]
    is_last = shown[0][:, 0, :num_tokens]  # (A, N) the probability that each token is the last one shown
    for t in range(1, log_probs.shape[1]):
        weights, last = is_last.topk(min(NUM_LAST, num_tokens))
        biased = torch.baddbmm(log_probs[:, t : t + 1], symbols.left_factors(last), right.mT).softmax(-1)  # (A, K, W)
        shown.append(torch.baddbmm(below_root[:, t : t + 1], weights[:, None], biased))
        is_last = shown[t][:, 0, :num_tokens]
        if has_blank:  # the last token stays the last one
            is_last = is_last.scatter_add(1, last, weights * biased[..., num_tokens])
    return torch.cat(shown, 1).sum(1)[:, :num_tokens]
