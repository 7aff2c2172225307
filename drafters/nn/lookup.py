"""Lookup: what an earlier passage of the text has in their place is read by the frames, or is the draft itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numba import njit
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.protocol import BaseShape

MAX_NGRAM = 8  # tokens; a longer match counts as one of so many


@dataclass(frozen=True, eq=False)
class Passages:
    """What followed the longest earlier match of the last tokens at A anchors of B texts, and the lookup's weights."""

    lookup: Lookup
    tokens: Tensor  # (B, A, T) the tokens behind the match; 0 where there is none
    lengths: Tensor  # (B, A) number of matching tokens, at most `MAX_NGRAM`; 0 where there is no match

    def additions(self, embedding: Tensor) -> Tensor:
        """What to add to the frames, (B, A, T, D), with the base's embedding (V, D)."""
        return self.lookup(self.tokens, self.lengths, embedding)

    def copy_logits(self, states: Tensor) -> Tensor:
        """Logits (B * A,) that a draft is its passage, in float32 at least, from the frames' states (B * A, T, D).

        Where nothing matched they are the smallest number: the probability is 0.
        """
        state, bias, lengths = self.lookup.copy_state, self.lookup.copy_bias, self.lengths.flatten()
        dtype = torch.promote_types(state.dtype, torch.float32)
        with torch.autocast(states.device.type, enabled=False):
            logits = states.mean(1, dtype=dtype) @ state.to(dtype)
        return torch.where(lengths > 0, logits + bias.to(dtype)[lengths - 1], torch.finfo(dtype).min)

    def begin_with(self, labels: Tensor) -> Tensor:
        """(B * A, U) bool: where a passage begins with the labels y_1..y_u, of (B * A, U), if there is one."""
        tokens, lengths = self.tokens.flatten(0, 1), self.lengths.flatten()
        return (tokens[:, : labels.shape[1]] == labels).cumprod(-1).bool() & (lengths > 0)[:, None]


class Lookup(nn.Module):
    """What a passage adds to T frames: the t-th frame that predicts a token gets the embedding of its t-th token.

    The embedding is normed, scaled by a vector for each number of matching tokens, which training makes as large as
    such matches are worth, and projected. The projection starts at zero, so training starts as if there was no lookup.

    One that ``copies`` also gives the probability that the draft is the passage itself: a logistic function of the
    frames' mean state, with a bias for each number of matching tokens.
    """

    def __init__(self, base: BaseShape, num_frames: int, first_frame: int = 0, copies: bool = False) -> None:
        super().__init__()
        self.norm_eps, self.num_frames, self.first_frame = base.norm_eps, num_frames, first_frame
        self.scale = nn.Parameter(torch.full((MAX_NGRAM, base.hidden_size), 0.2))
        self.proj = nn.Linear(base.hidden_size, base.hidden_size, bias=False)
        nn.init.zeros_(self.proj.weight)
        if copies:
            self.copy_bias = nn.Parameter(torch.linspace(-3.0, 0.0, MAX_NGRAM))  # near what SmolLM2's text gives
            self.copy_state = nn.Parameter(torch.zeros(base.hidden_size))

    def find(self, texts: Tensor, anchors: Tensor) -> Passages:
        """The passages of T tokens at anchors (B, A) of texts (B, S), of which nothing behind an anchor is read.

        A match ends at an earlier position with the anchor's token, however far back. Of equally long matches the
        latest counts. A passage that reaches the anchor begins again, as if the text did.
        """
        length = texts.shape[1]
        host = torch.cat([texts, anchors], 1).cpu().numpy()  # one copy, as back to the device
        found = torch.from_numpy(self.find_on_host(host[:, :length], host[:, length:]))
        return self.passages(found.to(self.scale.device))

    def find_on_host(self, texts: np.ndarray, anchors: np.ndarray) -> np.ndarray:
        """The tokens of each passage, and behind them the length of its match: (B, A, T + 1)."""
        return _find(texts, anchors, self.num_frames)

    def passages(self, found: Tensor) -> Passages:
        """The passages that `find_on_host` found, on the device."""
        return Passages(self, found[..., :-1], found[..., -1])

    def forward(self, tokens: Tensor, lengths: Tensor, embedding: Tensor) -> Tensor:
        """`Passages.additions` (B, A, T, D) of passages with these tokens (B, A, T) and match lengths (B, A)."""
        scale = torch.where(lengths[..., None] > 0, self.scale[lengths - 1], 0.0)  # (B, A, D)
        embedded = embedding[tokens].to(scale.dtype)
        normed = F.rms_norm(embedded, embedded.shape[-1:], eps=self.norm_eps)
        additions = self.proj(normed * scale[..., None, :])
        return F.pad(additions, (0, 0, self.first_frame, -self.first_frame)) if self.first_frame else additions


@njit(cache=True)
def _find(texts, anchors, num_tokens):
    """The tokens and lengths of `Passages` side by side: (B, A, T + 1)."""
    passages = np.zeros((*anchors.shape, num_tokens + 1), np.int64)
    for row in range(len(texts)):
        text = texts[row]
        for column in range(anchors.shape[1]):
            anchor, longest, last = anchors[row, column], 0, 0  # position of the last token of the longest match
            for end in range(anchor - 1, -1, -1):
                length = 0
                while length < min(MAX_NGRAM, end + 1) and text[end - length] == text[anchor - length]:
                    length += 1
                if length > longest:
                    longest, last = length, end
                if longest == MAX_NGRAM:
                    break
            passages[row, column, num_tokens] = longest
            if longest:
                for t in range(num_tokens):
                    passages[row, column, t] = text[last + 1 + t % (anchor - last)]
    return passages
