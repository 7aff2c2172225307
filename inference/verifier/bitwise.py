"""Bit-identical rows: attention whose result depends on positions alone, and forwards of enough rows.

A forward over several rows rounds differently from a forward over one, for two reasons: products of few rows sum in
another order, and so does attention where other nodes of the draft tree stand between the keys of a row. Here, each row
reads its keys in two parts, which are split at a place that its position alone decides:

    aligned  the keys before `aligned_end`, which lie in the cache at their positions
    tail     the keys after them, its own included, at most 64. Among them stand nodes that the row does not see; they
             are masked. The products add key by key, and a masked key adds exactly zero, so its place changes no bit

The parts are merged by their log-sum-exp. `row_multiples` finds of which number of rows the products of a model keep
their bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.tree import DraftTree

BLOCK, MAX_DEPTH = 32, 32  # a row's keys are split at a multiple of BLOCK, MAX_DEPTH or more keys before the row
MIN_TAIL, MAX_TAIL = 32, 128  # keys of a tail: products of very few keys, and of many (from 193 in MKL), sum otherwise
KEY_BLOCK = 512  # torch's attention on a CPU reads the keys in blocks of this size
ROW_MULTIPLE, MIN_COLUMNS = 4, 16  # products of fewer rows, or with fewer columns, sum in another order
LOWEST = -1e30  # what a mask adds; finite, so that a part that is masked as a whole has no NaN
UNKNOWN = "s_aux", "position_bias"  # arguments of transformers' attention that change it: sinks and biases
# The names by which transformers finds `attend`; the second is for models with soft-capping, which sdpa cannot compute.
SDPA, EAGER = "sdpa_bitwise", "eager_bitwise"
OWN_NAMES = {"sdpa": SDPA, "eager": EAGER}


def padded(num_rows: int, multiple: int | None) -> int:
    """How many rows are fed for so many rows of a text."""
    return num_rows + -num_rows % (multiple or 1)


# ---- which keys each row reads


@dataclass
class RowGroup:
    """R rows of a forward that are computed together, and the places of the keys in the cache that they read."""

    rows: np.ndarray  # (R,) among the fed tokens
    aligned: slice
    sees_aligned: np.ndarray  # (R, keys)
    tail: slice | Tensor
    sees_tail: np.ndarray  # (R, keys)
    _folded: dict[tuple[Any, ...], Folded] = field(default_factory=dict)

    def folded(self, *shape: Any) -> Folded:
        """Fold the rows of the query heads that share a key head, once for all layers of a shape (see `_fold`)."""
        if shape not in self._folded:
            self._folded[shape] = _fold(self, *shape)
        return self._folded[shape]


@dataclass(frozen=True)
class Folded:
    """The rows of a group for each of K key heads: those of all its query heads, N in all, a `ROW_MULTIPLE`."""

    index: Tensor  # (K, N) the query vector of each; those that fill up repeat the last
    aligned_mask: Tensor | None  # (N, keys), additive; None if all rows see all keys
    tail_mask: Tensor  # (1, N, keys), additive
    tail_values: Tensor  # (K, keys, e + 1 or more) memory for the values of the tail, with ones behind each


def aligned_end(positions: np.ndarray) -> np.ndarray:
    """Where the aligned part of the keys ends, for rows at these positions (R,)."""
    return np.maximum(0, (positions - MAX_DEPTH) // BLOCK * BLOCK)


def row_groups(
    num_pending: int, tree: DraftTree, start: int, first_visible: Callable[[np.ndarray], np.ndarray]
) -> list[RowGroup]:
    """Group the rows of P pending tokens, the root last, and M nodes behind ``start`` positions of the cache.

    Bits are kept for nodes of a depth up to `MAX_DEPTH`. ``first_visible`` gives the first position that rows at given
    positions (R,) may see, with this kind of attention.
    """
    root = start + num_pending - 1
    places, depths = np.arange(start, root + 1 + len(tree)), np.array(tree.depths, int)
    positions = np.concatenate([places[:num_pending], root + depths])
    ends = np.minimum(aligned_end(positions), root)  # no session feeds nodes deeper than `MAX_DEPTH`: they keep no bits
    sees_node = np.zeros((len(places), len(tree)), bool)
    sees_node[num_pending:] = tree.ancestor_mask()
    first = np.maximum(0, first_visible(positions))
    begins = np.where(first < ends, first // KEY_BLOCK * KEY_BLOCK, ends)
    is_masked = first > begins
    groups = []
    # Rows of one kind read the same keys, masked or not.
    for begin, end, masked in dict.fromkeys(zip(begins.tolist(), ends.tolist(), is_masked.tolist(), strict=True)):
        alike = np.flatnonzero((begins == begin) & (ends == end) & (is_masked == masked))
        num_before = min(root, int(positions[alike].max())) + 1 - end
        for rows in _branches(sees_node, alike, MAX_TAIL - num_before):
            nodes = np.flatnonzero(sees_node[rows].any(0))
            tail = np.concatenate([np.arange(end, end + num_before), root + 1 + nodes])
            tail_positions = np.concatenate([tail[:num_before], root + depths[nodes]])
            is_visible = first[rows, None] <= tail_positions
            is_visible[:, :num_before] &= tail[:num_before] <= positions[rows, None]
            is_visible[:, num_before:] &= sees_node[np.ix_(rows, nodes)]
            missing = max(0, MIN_TAIL - len(tail))  # filled up with the first key, which is masked there
            tail_index = _index(np.pad(tail, (0, missing), constant_values=tail[0]))
            sees_aligned = first[rows, None] <= np.arange(begin, end)
            sees_tail = np.pad(is_visible, ((0, 0), (0, missing)))
            groups.append(RowGroup(rows, slice(begin, end), sees_aligned, tail_index, sees_tail))
    return groups


def _branches(sees_node: np.ndarray, rows: np.ndarray, room: int) -> Iterator[np.ndarray]:
    """Split rows (R,) so that those of each part together see at most ``room`` nodes, if no row sees more."""
    if sees_node[rows].any(0).sum() <= room:
        yield rows
        return
    paths = {row: tuple(np.flatnonzero(sees_node[row]).tolist()) for row in rows.tolist()}
    part, nodes = list[int](), set[int]()
    for row in sorted(paths, key=paths.__getitem__):  # one branch after the other
        if part and len(nodes.union(paths[row])) > room:
            yield np.array(part)
            part, nodes = [], set()
        part.append(row)
        nodes.update(paths[row])
    yield np.array(part)


def _index(places: np.ndarray) -> slice | Tensor:
    """Places as a slice if they follow each other, which needs no copy."""
    first, last = int(places[0]), int(places[-1])
    return slice(first, last + 1) if last - first == len(places) - 1 else torch.from_numpy(places)


# ---- the attention


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of H heads over K key heads, as transformers calls it: (1, H, S, d), (1, K, C, d), (1, K, C, e).

    The mask is a `carrier` of row groups; any other goes to the model's own attention. ``softcap`` bounds the scores
    (Gemma 2). Returns (1, S, H, e), zero for rows of no group.
    """
    groups = getattr(attention_mask, "groups", None)
    if groups is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        others |= {} if softcap is None else {"softcap": softcap}
        is_eager = module.config._attn_implementation == EAGER
        plain = sys.modules[type(module).__module__].eager_attention_forward if is_eager else sdpa_attention_forward
        return plain(module, query, key, value, attention_mask, scaling=scaling, **others)
    if unknown := [name for name in UNKNOWN if others.get(name) is not None]:
        raise ValueError(f"no bit-identical attention with {unknown[0]}")
    (_, num_heads, num_rows, width), num_key_heads, value_width = query.shape, key.shape[1], value.shape[-1]
    scale = width**-0.5 if scaling is None else scaling
    vectors = query.transpose(1, 2).reshape(-1, width)  # (S * H, d)
    out = query.new_zeros(num_rows * num_heads, value_width)
    for group in groups:
        folded = group.folded(num_heads, num_key_heads, value_width, query.device)
        mixed = _attend(vectors[folded.index], key[0], value[0], group, folded, scale, softcap)
        out.index_copy_(0, folded.index.flatten(), mixed.reshape(-1, value_width).to(out.dtype))
    return out.view(1, num_rows, num_heads, value_width), None


def _fold(group: RowGroup, num_heads: int, num_key_heads: int, value_width: int, device: torch.device) -> Folded:
    num_repeats = num_heads // num_key_heads
    heads = np.arange(num_heads).reshape(num_key_heads, num_repeats, 1)
    index = (group.rows * num_heads + heads).reshape(num_key_heads, -1)
    fill = ((0, 0), (0, -index.shape[1] % ROW_MULTIPLE))

    def additive(is_visible: np.ndarray) -> Tensor:
        masked = np.pad(np.tile(~is_visible, (num_repeats, 1)), fill[::-1], mode="edge")
        return torch.from_numpy(masked * np.float32(LOWEST)).to(device)

    return Folded(
        torch.from_numpy(np.pad(index, fill, mode="edge")).to(device),
        None if group.sees_aligned.all() else additive(group.sees_aligned),
        additive(group.sees_tail)[None],
        torch.ones(num_key_heads, group.sees_tail.shape[1], max(value_width + 1, MIN_COLUMNS), device=device),
    )


def _attend(
    query: Tensor, key: Tensor, value: Tensor, group: RowGroup, folded: Folded, scale: float, softcap: float | None
) -> Tensor:
    """Attention (K, N, e) in float32 of folded rows (K, N, d) over keys (K, C, d) and values (K, C, e)."""
    scores = _scores(query, key[:, group.tail], folded.tail_mask, scale, softcap)
    top = scores.amax(-1, keepdim=True)
    aligned = None
    if group.aligned.start < group.aligned.stop:
        aligned, log_sum = _aligned(query, key[:, group.aligned], value[:, group.aligned], folded, scale, softcap)
        top = torch.maximum(top, log_sum)
    width = value.shape[-1]
    folded.tail_values[..., :width] = value[:, group.tail]
    sums = torch.bmm(scores.sub_(top).exp_(), folded.tail_values)  # key by key; a column of ones adds up the weights
    mixed, weight = sums[..., :width], sums[..., width : width + 1]
    if aligned is not None:
        share = log_sum.sub(top).exp_()
        mixed, weight = torch.addcmul(mixed, share, aligned.float()), weight + share
    return mixed / weight


def _aligned(
    query: Tensor, key: Tensor, value: Tensor, folded: Folded, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention over the aligned keys alone (K, N, e), and the logarithm of its sum (K, N, 1) in float32."""
    mask = folded.aligned_mask
    if query.device.type == "cpu" and not softcap and key.shape[-1] == value.shape[-1]:
        mask = mask if mask is None else mask[None, None].to(query.dtype)
        out, log_sum = _flash(query[None], key[None], value[None], 0.0, False, attn_mask=mask, scale=scale)[:2]
        return out[0], log_sum[0, ..., None]
    scores = _scores(query, key, query.new_zeros(1, dtype=torch.float32) if mask is None else mask, scale, softcap)
    top = scores.amax(-1, keepdim=True)
    sums = torch.bmm(scores.sub_(top).exp_(), F.pad(value.float(), (0, 1), value=1.0))
    return sums[..., :-1] / sums[..., -1:], top + sums[..., -1:].log()


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _scores(query: Tensor, key: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Masked scores (K, N, keys) in float32."""
    if softcap:
        return torch.bmm(query.float(), key.float().mT).mul_(scale / softcap).tanh_().mul_(softcap).add_(mask)
    return torch.baddbmm(mask, query.float(), key.float().mT, alpha=scale)


# ---- where transformers finds it


def use_own_attention(config: Any) -> None:
    """Let a model attend by `attend`, which computes what its own attention does unless row groups are given."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

    for name, mask in ((SDPA, sdpa_mask), (EAGER, eager_mask)):
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, mask)
    if config._attn_implementation == "sdpa" or getattr(config, "attn_logit_softcapping", None):
        config._attn_implementation = OWN_NAMES.get(config._attn_implementation, config._attn_implementation)


def use_transformers_attention(config: Any) -> None:
    """Undo `use_own_attention`."""
    config._attn_implementation = config._attn_implementation.removesuffix("_bitwise")


def carrier(groups: Sequence[RowGroup], num_rows: int, num_keys: int) -> Tensor:
    """A mask (1, 1, rows, keys) that brings row groups to `attend`; attention that adds it instead finds NaN."""
    mask: Any = torch.full((1, 1, 1, 1), torch.nan).expand(1, 1, num_rows, num_keys)
    mask.groups = groups
    return mask
