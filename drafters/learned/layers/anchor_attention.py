"""Who sees whom when many anchors of one text are trained at once, and attention under that mask."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


@dataclass(frozen=True)
class AnchorMask:
    """A frame sees the context strictly before its anchor, and the frames of its own block.

    The anchor itself is left out because, when drafting, the base has not yet seen it.

    Args:
        anchors: (B, A) positions.
        num_frames: T, frames of each anchor.
        num_context: S, positions of the context, which stand before the frames among the keys.
        causal: Whether a frame sees only itself and the frames before it in its block.
    """

    anchors: Tensor
    num_frames: int
    num_context: int
    causal: bool = False

    def sees(self, batch: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether frame ``query`` (of A * T) sees key ``key`` (of S + A * T); the three broadcast."""
        own, frames = key - self.num_context, self.num_frames
        before = (key < self.num_context) & (key < self.anchors[batch, query // frames])
        block = (own >= 0) & (torch.div(own, frames, rounding_mode="floor") == query // frames)
        return before | (block & (own <= query) if self.causal else block)

    def dense(self) -> Tensor:
        """(B, 1, A * T, S + A * T) bool."""
        device, num_queries = self.anchors.device, self.anchors.shape[1] * self.num_frames
        batch = torch.arange(len(self.anchors), device=device)[:, None, None, None]
        query = torch.arange(num_queries, device=device)[:, None]
        key = torch.arange(self.num_context + num_queries, device=device)
        return self.sees(batch, query, key)

    def pieces(self, size: int = 16) -> Pieces:
        """The same, cut along the anchors: most of it is false, and need not be multiplied.

        Args:
            size: Anchors of a piece.
        """
        found = []
        for anchors in self.anchors.split(size, dim=1):
            num_seen = min(int(anchors.max()), self.num_context)
            found.append((num_seen, AnchorMask(anchors, self.num_frames, num_seen, self.causal).dense()))
        return Pieces(tuple(found), self.num_context)

    def sparse(self) -> BlockMask:
        """The same for FlexAttention, which skips the blocks nobody looks at."""
        num_queries = self.anchors.shape[1] * self.num_frames
        return create_block_mask(
            lambda batch, head, query, key: self.sees(batch, query, key),
            B=len(self.anchors),
            H=None,
            Q_LEN=num_queries,
            KV_LEN=self.num_context + num_queries,
            device=str(self.anchors.device),
        )

    def best(self) -> BlockMask | Pieces:
        """What attends fastest on this device: sparse on CUDA, in pieces elsewhere."""
        return self.sparse() if self.anchors.is_cuda else self.pieces()


@dataclass(frozen=True)
class Pieces:
    """An `AnchorMask` in pieces: the frames of a few neighbouring anchors, and only the keys that these may see.

    Args:
        parts: For each piece the number s of context positions before its last anchor, and its mask (B, 1, Q, s + Q)
            over those positions and its own frames.
        num_context: S.
    """

    parts: tuple[tuple[int, Tensor], ...]
    num_context: int

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        lengths = [mask.shape[-2] for _, mask in self.parts]
        before, own = zip(*(x.split([self.num_context, sum(lengths)], dim=-2) for x in (keys, values)), strict=True)
        each = zip(self.parts, *(x.split(lengths, dim=-2) for x in (queries, *own)), strict=True)
        found = [
            F.scaled_dot_product_attention(
                query, *(torch.cat([x[..., :num_seen, :], y], -2) for x, y in zip(before, of_own, strict=True)), mask
            )
            for (num_seen, mask), query, *of_own in each
        ]
        return torch.cat(found, -2)


Mask = Tensor | BlockMask | Pieces | None


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Mask) -> Tensor:
    """Attention of (B, h, Q, d) over (B, h, K, d) under a mask of any kind."""
    if isinstance(mask, Pieces):
        return mask.attend(queries, keys, values)
    if isinstance(mask, BlockMask):
        flex = _compiled() if queries.is_cuda else flex_attention
        dtype = values.dtype  # under autocast the norms leave queries and keys in float32
        return flex(queries.to(dtype), keys.to(dtype), values, block_mask=mask)
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)


@cache
def _compiled():
    """FlexAttention is fast only when compiled; once a process."""
    return torch.compile(flex_attention, dynamic=True)
