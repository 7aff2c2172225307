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

    def best(self) -> Tensor | BlockMask:
        """What attends fastest on this device: sparse on CUDA, dense elsewhere."""
        return self.sparse() if self.anchors.is_cuda else self.dense()


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
    """Attention of (B, h, Q, d) over (B, h, K, d) under a mask of either kind."""
    if isinstance(mask, BlockMask):
        flex = _compiled() if queries.is_cuda else flex_attention
        dtype = values.dtype  # under autocast the norms leave queries and keys in float32
        return flex(queries.to(dtype), keys.to(dtype), values, block_mask=mask)
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)


@cache
def _compiled():
    """FlexAttention is fast only when compiled; once a process."""
    return torch.compile(flex_attention, dynamic=True)
