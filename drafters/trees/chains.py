"""Chains of drafters with a bias between neighbouring tokens: the bias is computed for the tokens taken only.

A draft tree needs the distribution after every candidate, which takes most of the time of a draft in a large
vocabulary. A chain only needs those after its own tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafters.nn.markov import Markov
from drafters.tree import DraftTree
from drafters.trees.best_first import SearchLimits


class Chains(NamedTuple):
    """The most probable continuation of each of A drafts, on the device.

    Args:
        tokens: (A, M) its tokens.
        probs: (A, M) probability of each prefix, float64. Behind a prefix of probability 0 the tokens mean nothing.
    """

    tokens: Tensor
    probs: Tensor

    def on_host(self, limits: SearchLimits) -> list[tuple[DraftTree, np.ndarray]]:
        """Copy them to the host at once, cut where the limits end a chain; with the probabilities of their nodes."""
        tokens, probs = torch.stack([self.tokens.double(), self.probs]).cpu().numpy()
        found = []
        for row, own in zip(tokens.astype(np.int64).tolist(), probs, strict=True):
            size = 0
            for token, probability in zip(row, own, strict=True):
                if not probability > 0.0 or probability < limits.min_probability:
                    break
                size += 1
                if token in limits.eos:
                    break
            found.append((DraftTree(row[:size], list(range(-1, size - 1))), own[:size]))
        return found


def chains(logits: Tensor, roots: Tensor, candidates: Tensor, markov: Markov, num_tokens: int) -> Chains:
    """What `best_first.chain` finds among the candidates, for frames that each show one token.

    Args:
        logits: (A, K, V) logits of the frames.
        roots: (A,) root tokens.
        candidates: (A, C) tokens that may enter a chain.
        markov: Bias on the logits given the previous token.
        num_tokens: M, from 1 to K.
    """
    last, path = roots, torch.ones(len(roots), 1, dtype=torch.float64, device=logits.device)
    tokens, probs = [], []
    for depth in range(num_tokens):
        shown = (logits[:, depth] + markov(last)).softmax(-1).gather(1, candidates)
        scores = (path * shown).minimum(path)  # rounding must not lift a child above its parent
        taken = scores.argmax(-1, keepdim=True)
        last, path = candidates.gather(1, taken)[:, 0], scores.gather(1, taken)
        tokens.append(last)
        probs.append(path[:, 0])
    return Chains(torch.stack(tokens, 1), torch.stack(probs, 1))
