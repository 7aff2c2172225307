"""The candidate tokens of each draft and their probabilities, copied to the host at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from drafters.nn.draft_vocabulary import DraftVocabulary
from drafters.nn.markov import Markov
from drafters.trees.search import Bias, Candidates

NUM_CONTEXTS = 4
"""Tokens after which each frame's distribution counts in the choice of candidates; 8 choose no better."""
NUM_LIKELY, NUM_BEFORE, NUM_LISTED = 4096, 16, 256
"""Of a larger vocabulary: the tokens that may be listed, those of them whose successors are, and the list's length."""


class Symbols(NamedTuple):
    """What the frames of A drafts may show: N tokens, then the blank if there is one, then, in a short list, the rest.

    The rest stands for all tokens that are not listed. It has their probability, and no bias.
    """

    logits: Tensor  # (A, T, W)
    tokens: Tensor  # (A, N)
    bias: Callable[[Tensor], Tensor]  # what the tokens before (A, K) add to the logits: (A, K, W)


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
    the token before it. Of more than 4,096 tokens, only those of a `short_list` are compared.

    Args:
        logits: (A, T, W) logits of the frames; W is V, or V + 1 with the blank last.
        roots: (A,) root tokens.
        vocab_size: V, or the size V' of the draft vocabulary.
        num_candidates: C.
        markov: Bias on the W logits given the previous token.
        vocabulary: The tokens that the columns of the logits stand for; None for all.
    """
    num_candidates, has_blank = min(num_candidates, vocab_size), logits.shape[-1] > vocab_size
    tokens = torch.arange(vocab_size, device=logits.device) if vocabulary is None else vocabulary.tokens
    tokens, bias = tokens.expand(len(logits), -1), None
    with torch.autocast(logits.device.type, enabled=False):  # bfloat16 is too coarse for a sum over V
        if markov is None:
            probs = logits.softmax(-1)
            best = probs[..., :vocab_size].amax(1).topk(num_candidates).indices  # (A, C), distinct
        else:
            symbols = Symbols(logits, tokens, markov)
            if vocab_size > max(NUM_LIKELY, num_candidates):
                symbols = short_list(logits, roots, tokens, max(NUM_LISTED, num_candidates), markov)
            best = expected_frames(symbols, roots, has_blank).topk(num_candidates).indices
            probs, tokens, bias = symbols.logits.softmax(-1), symbols.tokens, symbols.bias
        columns = pad(best, (0, has_blank), value=tokens.shape[1])
        chosen = tokens.gather(1, best)
        parts = [chosen, _at(probs, columns)]
        if bias is not None:  # softmax(z + B) is softmax(z) * exp(B), normalised again
            factors = bias(torch.cat([chosen, roots[:, None]], 1)).softmax(-1)  # (A, C + 1, W), rows up to a constant
            sums = factors.to(probs.dtype) @ probs.mT  # (A, C + 1, T)
            parts += [_at(factors, columns), sums.clamp(min=torch.finfo(sums.dtype).tiny).reciprocal()]
    tokens_on_host, shown, *of_bias = on_host(*parts)
    blank = shown[..., -1] if has_blank else None
    return Candidates(
        tokens_on_host.astype(np.int64), shown[..., :num_candidates], blank, Bias(*of_bias) if of_bias else None
    )


def expected_frames(symbols: Symbols, roots: Tensor, has_blank: bool, num_contexts: int = NUM_CONTEXTS) -> Tensor:
    """The expected number of each draft's frames that show each token: (A, N).

    Frame by frame, the distributions after the ``num_contexts`` most probable last tokens are added up, weighted by the
    probability that the token is the last one. A prefix is at most as probable as its last token is expected, so with
    all N contexts no token is missed whose node is more probable than the least expected candidate.
    """
    logits, tokens, bias = symbols
    num_tokens, is_root = tokens.shape[1], tokens == roots[:, None]
    # Contexts are columns; N is a root that is not among the tokens.
    contexts = torch.where(is_root.any(1), is_root.int().argmax(1), num_tokens)[:, None]  # (A, K)
    tokens, weights = torch.cat([tokens, roots[:, None]], 1), logits.new_ones(len(roots), 1)
    expected = logits.new_zeros(len(roots), num_tokens)
    for t in range(logits.shape[1]):
        shown = (logits[:, t, None] + bias(tokens.gather(1, contexts))).softmax(-1)  # (A, K, W)
        last = (weights[:, None] @ shown)[:, 0, :num_tokens]
        expected += last
        last = pad(last, (0, 1))
        if has_blank:  # after a blank, the last token is the one before it
            last.scatter_add_(1, contexts, weights * shown[..., num_tokens])
        weights, contexts = last.topk(min(num_contexts, num_tokens + 1))
    return expected


def short_list(logits: Tensor, roots: Tensor, tokens: Tensor, size: int, markov: Markov) -> Symbols:
    """The ``size`` tokens of each draft that are likely in a frame, or that the bias makes likely after such a token.

    A token counts with its largest probability in any frame, times what the bias makes of it after the token before
    that favours it most: the root, or one of 16 likely tokens, which counts with its own largest probability. Takes the
    logits (A, T, V or V + 1) and the tokens (A, V) of their columns.
    """
    log_probs, vocab_size = logits.log_softmax(-1), tokens.shape[1]
    likely = log_probs[..., :vocab_size].amax(1).topk(max(NUM_LIKELY, size))  # (A, L), the most probable first
    before = torch.cat([roots[:, None], tokens.gather(1, likely.indices[:, :NUM_BEFORE])], 1)
    raised = embedding(before, markov.left) @ embedding(likely.indices, markov.right).mT  # (A, 1 + 16, L)
    raised = raised - raised.mean(-1, keepdim=True) + pad(likely.values[:, :NUM_BEFORE], (1, 0))[..., None]
    listed = likely.indices.gather(1, (likely.values + raised.amax(1).clamp(min=0)).topk(size).indices)
    columns = pad(listed, (0, logits.shape[-1] - vocab_size), value=vocab_size)  # and the blank, if there is one
    shown = _at(log_probs, columns)
    rest = (1 - shown.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(shown.dtype).tiny).log()
    right = pad(embedding(columns, markov.right), (0, 0, 0, 1)).mT  # (A, R, W)
    return Symbols(
        torch.cat([shown, rest], -1), tokens.gather(1, listed), lambda before: embedding(before, markov.left) @ right
    )


def _at(values: Tensor, columns: Tensor) -> Tensor:
    """The columns (A, C) of values (A, K, W): (A, K, C)."""
    return values.gather(-1, columns[:, None].expand(-1, values.shape[1], -1))


def on_host(*parts: Tensor) -> list[np.ndarray]:
    """Copy tensors to the host at once, in the dtype of the second; float32 holds token ids exactly."""
    flat = torch.cat([part.flatten().to(parts[1].dtype) for part in parts]).cpu().numpy()
    ends = np.cumsum([part.numel() for part in parts])[:-1]
    return [numbers.reshape(part.shape) for numbers, part in zip(np.split(flat, ends), parts, strict=True)]
