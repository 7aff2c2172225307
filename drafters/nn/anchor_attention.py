"""The attention mask of training, where frames of many anchors are computed at once, and attention under that mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from drafters.dry_run import dry_run_device

BLOCK = 128  # keys that FlexAttention reads together


@dataclass(frozen=True)
class AnchorMask:
    """Lets a frame attend to the context strictly before its anchor and to the frames of its own block.

    The anchor itself is excluded because during decoding the base has not processed it yet. With a window, all frames
    of a block attend to the same context positions, the last ones before the anchor.
    """

    anchors: Tensor  # (B, A) positions
    num_frames: int  # T, frames of each anchor
    num_context: int  # S, context positions; they come before the frames among the keys
    causal: bool = False  # whether a frame attends only to itself and to earlier frames of its block
    window: int = 0  # number of context positions that a frame attends to; 0 for all of them

    def rule(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Whether, given batch, head, frame (of A * T) and key (of S + A * T), the frame may attend to the key.

        The four broadcast. Only tensors are read, see `CacheMask.rule`.
        """
        unlimited = 2**62  # more than the context, as an anchor may lie behind what is kept of a text
        sizes = self.num_frames, self.num_context, self.window or unlimited
        frames, context, window = (torch.full((), size, device=self.anchors.device) for size in sizes)
        anchors, causal = self.anchors, self.causal

        def allows(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            key_frame, block = key - context, torch.div(query, frames, rounding_mode="floor")
            anchor = anchors[batch, block]
            before = (key < context) & (key < anchor) & (key >= anchor - window)
            own = (key_frame >= 0) & (torch.div(key_frame, frames, rounding_mode="floor") == block)
            return before | (own & (key_frame <= query) if causal else own)

        return allows

    def dense(self) -> Tensor:
        """The mask as a tensor, (B, 1, A * T, S + A * T) bool."""
        device, num_queries = self.anchors.device, self.anchors.shape[1] * self.num_frames
        batch = torch.arange(len(self.anchors), device=device)[:, None, None, None]
        query = torch.arange(num_queries, device=device)[:, None]
        key = torch.arange(self.num_context + num_queries, device=device)
        return self.rule()(batch, batch, query, key)

    def pieces(self, num_anchors: int = 16) -> Pieces:
        """The mask cut into pieces of a few anchors: most of it is false, and those keys need not be multiplied."""
        parts = []
        for anchors in self.anchors.split(num_anchors, dim=1):
            end = min(int(anchors.max()), self.num_context)
            start = min(max(0, int(anchors.min()) - self.window), end) if self.window else 0
            mask = replace(self, anchors=anchors - start, num_context=end - start)
            parts.append((slice(start, end), mask.dense()))
        return Pieces(tuple(parts), self.num_context)

    def sparse(self) -> BlockMask:
        """The mask for FlexAttention, which skips blocks that no frame attends to."""
        num_queries = self.anchors.shape[1] * self.num_frames
        sizes = len(self.anchors), None, num_queries, self.num_context + num_queries  # B, all heads, queries, keys
        return create_block_mask(self.rule(), *sizes, device=str(self.anchors.device))

    def best(self) -> BlockMask | Pieces | None:
        """The form of the mask that is fastest on this device: sparse on CUDA, pieces elsewhere; see also `dry_run`."""
        if dry_run_device() == "cuda":
            with FakeTensorMode(allow_non_fake_inputs=True):
                anchors = torch.empty(self.anchors.shape, dtype=torch.long)
            replace(self, anchors=anchors).sparse()  # which takes memory as well
            return None
        return self.sparse() if self.anchors.is_cuda else self.pieces()


@dataclass(frozen=True)
class Pieces:
    """An `AnchorMask` in pieces: the frames of a few neighbouring anchors with only the keys they may attend to."""

    # For each piece the s context positions from the first window, or the start, to its last anchor, and its mask
    # (B, 1, Q, s + Q) over those positions and its own frames.
    parts: tuple[tuple[slice, Tensor], ...]
    num_context: int  # S

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of (B, h, Q, d) over (B, h, S + Q, d), piece by piece."""
        lengths = [mask.shape[-2] for _, mask in self.parts]
        context_keys, frame_keys = keys.split([self.num_context, sum(lengths)], dim=-2)
        context_values, frame_values = values.split([self.num_context, sum(lengths)], dim=-2)
        frames = zip(*(x.split(lengths, dim=-2) for x in (queries, frame_keys, frame_values)), strict=True)
        attended = []
        for (context, mask), (query, key, value) in zip(self.parts, frames, strict=True):
            key = torch.cat([context_keys[..., context, :], key], -2)
            value = torch.cat([context_values[..., context, :], value], -2)
            attended.append(attend(query, key, value, mask))
        return torch.cat(attended, -2)


@dataclass(frozen=True)
class CacheMask:
    """Lets T frames attend to a text in a cache of fixed size, and to each other in the slots behind the text.

    Its numbers are on the device, so that a CUDA graph makes the mask anew for a text that has grown.
    """

    first: Tensor  # (1,) the first position that the frames attend to
    length: Tensor  # (1,) of the text
    num_frames: int  # T
    num_keys: int  # positions of the cache
    causal: bool = False  # whether a frame attends only to itself and to earlier frames

    def rule(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Whether, given batch, head, frame and position, the frame may attend to the position; the four broadcast.

        It reads tensors only: a number of Python becomes a symbol when FlexAttention is compiled for any size, and then
        gives wrong results on a CPU (torch 2.13).
        """
        first, length, end = self.first, self.length, self.length + self.num_frames
        if self.causal:
            return lambda batch, head, query, key: (key >= first[batch]) & (key <= length[batch] + query)
        return lambda batch, head, query, key: (key >= first[batch]) & (key < end[batch])

    def dense(self) -> Tensor:
        """The mask as a tensor (T, number of keys) bool."""
        queries, keys = (torch.arange(size, device=self.length.device) for size in (self.num_frames, self.num_keys))
        zeros = torch.zeros_like(keys)
        return self.rule()(zeros, zeros, queries[:, None], keys).expand(self.num_frames, -1)

    def sparse(self) -> BlockMask:
        """The mask for FlexAttention, see `block_mask`."""
        starts = torch.arange(0, self.num_keys, BLOCK, device=self.length.device)
        is_whole = (starts >= self.first) & (starts + BLOCK <= self.length)
        is_seen = (starts + BLOCK > self.first) & (starts < self.length + self.num_frames)
        return block_mask(is_seen, is_whole, self.rule(), self.num_frames, self.num_keys)

    @cached_property
    def best(self) -> Tensor | BlockMask:
        """The form of the mask that is fastest on this device."""
        return self.sparse() if self.length.is_cuda else self.dense()

    @cached_property
    def slots(self) -> Tensor:
        """The positions (T,) of the cache into which the frames' keys and values are written."""
        return self.length + torch.arange(self.num_frames, device=self.length.device)


def block_mask(
    is_seen: Tensor, is_whole: Tensor, rule: Callable[..., Tensor], num_queries: int, num_keys: int
) -> BlockMask:
    """The mask for FlexAttention, made on the device for a few queries over a long cache.

    It reads those blocks of 128 keys that any query sees (blocks,), and of these the ones that all queries see as a
    whole (blocks,), nearly all of a text, without asking the ``rule``.
    """

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        """The number of the blocks that are true, and their indices before the others."""
        indices = blocks.int().argsort(descending=True, stable=True)
        return blocks.sum(dtype=torch.int32).view(1, 1, 1), indices.int().view(1, 1, 1, -1)

    sizes = -(-num_queries // BLOCK) * BLOCK, BLOCK
    partial, whole = listed(is_seen & ~is_whole), listed(is_whole)
    return BlockMask.from_kv_blocks(*partial, *whole, sizes, rule, seq_lengths=(num_queries, num_keys))


def flex_options(num_rows: int) -> dict[str, int]:
    """Sizes for FlexAttention's kernel of a few queries, from the rows that share a key head.

    By default all are in one tile, which is too large for a block of 128 queries, and for the registers before that.
    """
    return {"BLOCK_M": min(64, max(16, 1 << (num_rows - 1).bit_length())), "num_warps": 4}


Mask = Tensor | BlockMask | Pieces | CacheMask | None


def extended(context: Tensor, block: Tensor, mask: Mask) -> Tensor:
    """Keys or values (B, h, K, d) of a context and a block: the frames of a `CacheMask` are written into its cache."""
    if isinstance(mask, CacheMask):
        return context.index_copy_(-2, mask.slots, block)
    return torch.cat([context, block], -2)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Mask) -> Tensor:
    """Attention of (B, h, Q, d) over (B, key heads, K, d) under a mask of any form."""
    mask = mask.best if isinstance(mask, CacheMask) else mask
    if isinstance(mask, Pieces):
        return mask.attend(queries, keys, values)
    if isinstance(mask, BlockMask):
        flex: Any = _compiled() if queries.is_cuda else flex_attention
        dtype = values.dtype  # under autocast the norms leave queries and keys in float32
        num_shared = queries.shape[1] // keys.shape[1]
        if num_shared & (num_shared - 1):  # FlexAttention groups heads in powers of 2
            keys, values = keys.repeat_interleave(num_shared, 1), values.repeat_interleave(num_shared, 1)
        num_shared = queries.shape[1] // keys.shape[1]
        options: dict[str, Any] = {"block_mask": mask, "enable_gqa": num_shared > 1}
        if queries.is_cuda and queries.shape[-2] < BLOCK:
            options["kernel_options"] = flex_options(num_shared * queries.shape[-2])
        return flex(queries.to(dtype), keys.to(dtype), values, **options)
    return F.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=queries.shape[1] != keys.shape[1])


@cache
def _compiled() -> Callable[..., Tensor]:
    """Compiled FlexAttention, compiled once per process; it is fast only when compiled."""
    return torch.compile(flex_attention, dynamic=True)
