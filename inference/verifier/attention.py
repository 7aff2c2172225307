"""Tree attention: what each fed token may see, as additive masks, and where the positions of a draft tree end."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import PretrainedConfig
from transformers.cache_utils import Cache

from drafters.tree import DraftTree
from inference.verifier.bitwise import EAGER, carrier, padded, row_groups

MAX_PENDING_OF_KEPT_MASKS = 8  # steps feed few pending tokens, a prefill feeds many and its mask is needed once


@dataclass(frozen=True)
class Fed:
    """What one forward of the base reads: S tokens behind a cache."""

    ids: Tensor  # (1, S) token ids
    positions: Tensor  # (1, S)
    # Additive attention mask (1, 1, S, cached + S) for each kind of attention in the base. None means plain causal
    # attention, which is right for an empty cache or a single new token. FlexAttention takes a BlockMask.
    masks: Mapping[str, Tensor | BlockMask | None]
    cache: Cache  # keys and values of the tokens before; the forward adds those of the S tokens


class TreeAttention:
    """Builds what the forwards of one causal language model over [pending tokens | draft tree] read."""

    def __init__(self, model: Any) -> None:
        from transformers import GenerationMixin

        config = model.config
        self.device, self.dtype = model.device, model.dtype
        self.spans = attention_spans(config)  # positions of a window or chunk, for each kind of attention
        # sdpa reads a missing mask as causal attention, eager as no mask at all.
        self._is_causal_without_mask = config._attn_implementation not in ("eager", EAGER)
        self._end, self._border = config.max_position_embeddings, longrope_border(config)
        # Phi-3's `generate` computes the whole text again at the border, others only what they have not cached.
        prepare = type(model).prepare_inputs_for_generation
        self._recomputes = prepare is not GenerationMixin.prepare_inputs_for_generation

    def feed(
        self,
        pending: Sequence[int],
        tree: DraftTree,
        start: int,
        cache: Cache,
        positions: Sequence[int] | None = None,
        row_multiple: int | None = None,
    ) -> Fed:
        """Feed P pending tokens and M nodes behind ``start`` positions of the cache.

        A pending token sees the cache and the pending tokens up to itself. A node sees the cache, all pending tokens,
        its ancestors and itself, and its position is that of the root plus its depth. Layers with a sliding window or
        chunks see those of them that are near enough by their positions; their places in the cache do not matter. For
        the root "the" and the paths "cat sat" and "dog":

                   cache  the  cat  sat  dog
            the      x     x
            cat      x     x    x
            sat      x     x    x    x
            dog      x     x              x

        With a ``row_multiple``, each row attends as `inference.verifier.bitwise` says, and copies of the root, which
        nobody sees, fill the rows up to a multiple.
        """
        root = start + len(pending) - 1
        positions = positions or [*range(start, root + 1), *(root + depth for depth in tree.depths)]
        num_fillers = padded(len(positions), row_multiple) - len(positions)
        tokens = [*pending, *tree.tokens, *[pending[-1]] * num_fillers]
        fed = torch.tensor([tokens, [*positions, *[root] * num_fillers]], device=self.device)  # one copy to the device
        if row_multiple is None:
            masks = self._masks(len(pending), tree, start, cache, fed[1], max(positions) + 1)
        else:
            masks = {}
            for kind, span in self.spans.items():
                groups = row_groups(len(pending), tree, start, partial(first_visible, kind, span))
                masks[kind] = carrier(groups, len(tokens), start + len(tokens))
        return Fed(fed[:1], fed[1:], masks, cache)

    def _masks(
        self, num_pending: int, tree: DraftTree, start: int, cache: Cache, positions: Tensor, end: int
    ) -> dict[str, Tensor | None]:
        """The masks for tokens at these positions (P + M,), which lie before ``end``."""
        all_near = end <= min(self.spans.values())
        is_causal = num_pending == 1 or (self._is_causal_without_mask and not start)
        if not len(tree) and all_near and is_causal and cache.get_seq_length() == start:
            return dict.fromkeys(self.spans)
        make = kept_mask if num_pending <= MAX_PENDING_OF_KEPT_MASKS else causal_tree_mask
        mask = make(num_pending, tuple(tree.parents), self.dtype, self.device)
        mask = nn.functional.pad(mask, (start, 0))[None, None]
        if all_near:
            return dict.fromkeys(self.spans, mask)
        key_positions = torch.cat([torch.arange(start, device=self.device), positions])
        lowest = torch.finfo(self.dtype).min
        return {
            kind: mask.masked_fill(key_positions < first_visible(kind, span, positions)[:, None], lowest)
            for kind, span in self.spans.items()
        }

    def end_of_positions(self, length: int) -> int:
        """Where the positions of the draft tree behind a text of this length must end: with the context.

        A base with longrope scaling changes the angles of all positions of a forward that reaches the border of the
        scaling, so a draft tree must not reach it before the root does.
        """
        return self._end if self._border is None or length > self._border else self._border

    def is_stale(self, length: int, cached: int, num_short: int) -> bool:
        """Whether `generate` would have computed the cache behind a text of this length with other longrope factors.

        Of the cached positions, ``num_short`` were computed before the border, with the short factors.
        """
        if self._border is None:
            return False
        if length <= self._border:
            return cached > num_short
        return num_short > 0 and (self._recomputes or length - cached > 1)

    def is_short(self, length: int) -> bool:
        """Whether a forward over a text of this length stays before the border of longrope scaling."""
        return self._border is None or length <= self._border


def first_visible(kind: str, span: int, positions: Any) -> Any:
    """The first position that a token at each of the positions (R,) may see, with this kind of attention."""
    if kind == "chunked_attention":
        return positions - positions % span
    return positions - span + 1 if kind == "sliding_attention" else 0 * positions


def visible_rows(num_pending: int, parents: tuple[int, ...]) -> np.ndarray:
    """The fed rows (P + M, P + M) that each of P pending tokens and M nodes with these parents sees."""
    is_visible = np.tri(num_pending + len(parents), dtype=bool)
    is_visible[num_pending:, num_pending:] = DraftTree(parents, parents).ancestor_mask()
    return is_visible


def causal_tree_mask(num_pending: int, parents: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The additive attention mask (P + M, P + M) of `visible_rows`."""
    is_visible = visible_rows(num_pending, parents)
    mask = torch.zeros(is_visible.shape, dtype=dtype)
    mask[torch.from_numpy(~is_visible)] = torch.finfo(dtype).min
    return mask.to(device)


kept_mask = lru_cache(maxsize=256)(causal_tree_mask)  # chains and lookahead windows look the same in every step


def attention_kinds(config: PretrainedConfig) -> list[str]:
    """Return the kind of attention of each layer by transformers' name for it, such as ``sliding_attention``."""
    if kinds := getattr(config, "layer_types", None):
        return list(kinds)
    if getattr(config, "sliding_window", None):
        kind = "sliding_attention"
    else:
        kind = "chunked_attention" if getattr(config, "attention_chunk_size", None) else "full_attention"
    return [kind] * config.num_hidden_layers


def attention_spans(config: PretrainedConfig) -> dict[str, int]:
    """Return the number of positions of a window or chunk for each kind of attention in a base.

    Raises ValueError if a layer keeps a state from which rejected drafts cannot be removed.
    """
    sizes = {"full_attention": sys.maxsize}
    sizes["sliding_attention"] = getattr(config, "sliding_window", None) or sys.maxsize
    sizes["chunked_attention"] = getattr(config, "attention_chunk_size", None) or sys.maxsize
    kinds = sorted(set(attention_kinds(config)))
    if unknown := [kind for kind in kinds if kind not in sizes]:
        raise ValueError(f"it has {' and '.join(unknown)} layers, which are not supported")
    return {kind: sizes[kind] for kind in kinds}


def longrope_border(config: PretrainedConfig) -> int | None:
    """Return the position from which a base with longrope scaling, if it has any, uses its long factors.

    A forward that feeds this position or a later one computes all its tokens with them, any other with the short ones.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    by_kind = [value for value in rope.values() if isinstance(value, dict)]  # some bases have parameters for each kind
    default = getattr(config, "original_max_position_embeddings", None)
    scalings = [scaling for scaling in (rope, *by_kind) if scaling.get("rope_type") == "longrope"]
    borders = [scaling.get("original_max_position_embeddings", default) for scaling in scalings]
    return min((border for border in borders if border is not None), default=None)
