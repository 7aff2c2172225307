"""The candidate tokens of each draft and their probabilities."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from drafters.losses.gathered_logits import at_least_float32
from drafters.nn.draft_vocabulary import DraftVocabulary
from drafters.nn.markov import Markov
from drafters.trees.search import Bias, Candidates

NUM_LIKELY, NUM_LISTED, NUM_BEFORE = 512, 96, 8
"""With a bias: the tokens that are biased, the fewest candidates, and the tokens whose successors may be some."""
NUM_AT_ONCE = 16  # drafts whose candidates are chosen together: of a large vocabulary, 6 MB each


class Symbols(NamedTuple):
    """What the frames of A drafts may show: N likely tokens, the blank if there is one, and the rest.

    The rest stands for all other tokens: it has their probability, and no bias.
    """

    log_probs: Tensor  # (A, T, W)
    tokens: Tensor  # (A, N)
    left: Tensor  # (V, R) left factor of the Markov bias
    right: Tensor  # (A, W, R) its right factor

    def bias(self, before: Tensor) -> Tensor:
        """What the tokens before (A, K) add to the logits: (A, K, W)."""
        return embedding(before, self.left) @ self.right.mT


def choose(
    logits: Tensor,
    roots: Tensor,
    vocab_size: int,
    num_candidates: int,
    markov: Markov | None = None,
    vocabulary: DraftVocabulary | None = None,
) -> list[Tensor]:
    """The C candidates of each draft with their probabilities, on the device; on the host they are `Candidates`.

    Without a bias they are the tokens that are most probable in any frame. With one a token may be improbable in every
    frame and yet be certain after the token before it: the bias is multiplied for the 512 tokens that are most probable
    in any frame, and a `short_list` of these are the candidates, 96 at least.

    Args:
        logits: (A, T, W) logits of the frames; W is V, or V + 1 with the blank last.
        roots: (A,) root tokens.
        vocab_size: V, or the size V' of the draft vocabulary.
        num_candidates: C.
        markov: Bias on the W logits given the previous token.
        vocabulary: The tokens that the columns of the logits stand for; None for all.
    """
    num_candidates = min(num_candidates, vocab_size)
    tokens = torch.arange(vocab_size, device=logits.device) if vocabulary is None else vocabulary.tokens
    with torch.autocast(logits.device.type, enabled=False):  # bfloat16 is too coarse for a sum over V
        parts = [
            _choose(few_logits, few_roots, tokens.expand(len(few_roots), -1), num_candidates, markov)
            for few_logits, few_roots in zip(logits.split(NUM_AT_ONCE), roots.split(NUM_AT_ONCE), strict=True)
        ]
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def candidates(parts: Sequence[np.ndarray]) -> Candidates:
    """What `choose` returned, on the host."""
    token_ids, probs, *bias = parts
    num_candidates = token_ids.shape[1]
    blank = probs[..., -1] if probs.shape[-1] > num_candidates else None
    return Candidates(token_ids.astype(np.int64), probs[..., :num_candidates], blank, Bias(*bias) if bias else None)


def _choose(
    logits: Tensor, roots: Tensor, tokens: Tensor, num_candidates: int, markov: Markov | None
) -> tuple[Tensor, ...]:
    """The candidate tokens (A, C), their probabilities (A, T, C + e), and the factors and scales of their `Bias`."""
    vocab_size = tokens.shape[1]
    has_blank = logits.shape[-1] > vocab_size
    if markov is None:
        probs = logits.softmax(-1)
        best = probs[..., :vocab_size].amax(1).topk(num_candidates).indices  # (A, C), distinct
        return tokens.gather(1, best), _at(probs, pad(best, (0, has_blank), value=vocab_size))
    left, right = map(at_least_float32, (markov.left, markov.right))
    log_probs = logits.log_softmax(-1)
    likely = log_probs[..., :vocab_size].amax(1).topk(min(vocab_size, max(NUM_LIKELY, num_candidates))).indices
    kept = pad(likely, (0, has_blank), value=vocab_size)
    kept_log_probs = _at(log_probs, kept)
    rest = (1 - kept_log_probs.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(log_probs.dtype).tiny).log()
    kept_right = pad(embedding(kept, right), (0, 0, 0, 1))
    symbols = Symbols(torch.cat([kept_log_probs, rest], -1), tokens.gather(1, likely), left, kept_right)
    best = short_list(symbols, roots, min(vocab_size, max(NUM_LISTED, num_candidates)))
    probs, columns = symbols.log_probs.softmax(-1), pad(best, (0, has_blank), value=likely.shape[1])
    chosen = symbols.tokens.gather(1, best)
    # softmax(z + B) is softmax(z) * exp(B), normalised again.
    factors = symbols.bias(torch.cat([chosen, roots[:, None]], 1)).to(probs.dtype).softmax(-1)  # (A, C + 1, W)
    sums = factors @ probs.mT  # (A, C + 1, T)
    scales = sums.clamp(min=torch.finfo(sums.dtype).tiny).reciprocal()
    return chosen, _at(probs, columns), _at(factors, columns), scales


def short_list(symbols: Symbols, roots: Tensor, size: int) -> Tensor:
    """The columns (A, size) of the tokens that are likely in a frame, or that the bias makes likely after such a token.

    A token counts with its largest probability in any frame, times what the bias makes of it after the token before
    that favours it most: the root, or one of the 8 most likely tokens, which come first and count with their own
    largest probability.
    """
    likely = symbols.log_probs[..., : symbols.tokens.shape[1]].amax(1)  # (A, N)
    raised = symbols.bias(torch.cat([roots[:, None], symbols.tokens[:, :NUM_BEFORE]], 1))[..., : likely.shape[1]]
    raised = raised - raised.mean(-1, keepdim=True) + pad(likely[:, :NUM_BEFORE], (1, 0))[..., None]  # (A, 1 + 8, N)
    return (likely + raised.amax(1).clamp(min=0)).topk(size).indices


def _at(values: Tensor, columns: Tensor) -> Tensor:
    """The columns (A, C) of values (A, K, W): (A, K, C)."""
    return values.gather(-1, columns[:, None].expand(-1, values.shape[1], -1))
