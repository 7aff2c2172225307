"""A step of the base as a function of tensors with fixed shapes: R rows over all C positions of a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from transformers.cache_utils import Cache, DynamicLayer
from transformers.utils.output_capturing import _active_collector

from drafters.nn.anchor_attention import BLOCK, block_mask, flex_options
from drafters.tree import DraftTree
from inference.verifier.attention import Fed, first_visible, visible_rows
from inference.verifier.layers import cache_name, model_lock, run_base

IDS, POSITIONS, SLOTS, VISIBLE = 0, 1, 2, 3  # rows of the inputs; from the last on, what each fed row sees
FLEX = "flex_grouped"  # the name by which transformers finds `attend`
BACKEND = "inductor"
FLEX_ON = frozenset(["cuda"])  # devices on which models attend by FlexAttention


def step_inputs(pending: Sequence[int], tree: DraftTree, start: int, num_rows: int) -> np.ndarray:
    """Return what a step of R rows behind ``start`` positions reads, one array (3 + R, R) for one copy to the device.

    Its rows are the token ids, their positions and their slots in the cache, then the fed rows that each fed row sees.
    The rows behind the P pending tokens and the M nodes repeat the root: nobody sees them, and what they write lies
    behind the text.
    """
    num_fed, root = len(pending) + len(tree), start + len(pending) - 1
    num_padded = num_rows - num_fed
    inputs = np.zeros((VISIBLE + num_rows, num_rows), np.int64)
    inputs[IDS] = [*pending, *tree.tokens, *[pending[-1]] * num_padded]
    inputs[POSITIONS] = [*range(start, root + 1), *(root + depth for depth in tree.depths), *[root] * num_padded]
    inputs[SLOTS] = range(start, start + num_rows)
    inputs[VISIBLE : VISIBLE + num_fed, :num_fed] = visible_rows(len(pending), tuple(tree.parents))
    inputs[VISIBLE + num_fed :, : len(pending)] = True
    return inputs


def run_step(
    model: Any,
    inputs: Tensor,
    views: Sequence[tuple[Tensor, Tensor]],
    spans: Mapping[str, int],
    layers: tuple[int, ...],
    layer_function: Callable[..., Any] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run the base on R rows: logits (R, V), and the hidden states (R, F * D) or None. A function of tensors alone.

    Args:
        model: The base's model.
        inputs: (3 + R, R), see `step_inputs`.
        views: Keys and values of each layer, of all C positions of the cache; those of the fed rows are written.
        spans: See `attention_spans`.
        layers: The hidden layers.
        layer_function: Runs a decoder layer, as `run_layer` does; None for the layers' own forwards.
    """
    slots, length, device = inputs[SLOTS], views[0][0].shape[2], inputs.device
    is_flex = device.type in FLEX_ON and has_flex_attention(model)
    with ExitStack() as changes:
        changes.enter_context(model_lock(model))
        if is_flex:
            changes.enter_context(flex_attention(model.config))
        changes.enter_context(own_layers(model, views, slots, layer_function))
        masks: dict[str, Tensor | BlockMask] = {}
        for kind, span in spans.items():
            sees = visibility(inputs, kind, span)
            mask = dense_mask(sees, len(slots), length, device)
            masks[kind] = sparse_mask(mask, sees, num_folded(model.config)) if is_flex else additive(mask, model.dtype)
        fed = Fed(inputs[IDS : IDS + 1], inputs[POSITIONS : POSITIONS + 1], masks, StepCache(views, slots))
        logits, states = run_base(model, fed, None, layers)
    return logits, torch.cat([states[layer][0] for layer in layers], dim=-1) if layers else None


# ---- what each row sees

Visibility = Callable[[Any, Any, Any, Any], Tensor]
"""Whether a row sees a place of the cache, as FlexAttention asks: by batch, head, row and place."""


def visibility(inputs: Tensor, kind: str, span: int) -> Visibility:
    """What the rows of a step see with one kind of attention (`attention_spans`): the text, and fed rows of theirs.

    Behind row R - 1 the rows begin again, as those of the next head that shares the keys.
    """
    positions, slots, visible = inputs[POSITIONS], inputs[SLOTS], inputs[VISIBLE:].bool()
    start, num_rows, first = slots[0], len(slots), first_visible(kind, span, positions)

    def sees(_batch: Any, _head: Any, row: Any, place: Any) -> Tensor:
        row, fed = row % num_rows, (place - start).clamp(0, num_rows - 1)
        is_fed = (place >= start) & (place < start + num_rows) & visible[row, fed]
        position = torch.where(place < start, place, positions[fed])
        return ((place < start) | is_fed) & (position >= first[row])

    return sees


def dense_mask(sees: Visibility, num_rows: int, length: int, device: torch.device) -> Tensor:
    """Whether each of R rows sees each place of a cache: (R, C) bool."""
    rows, places = torch.arange(num_rows, device=device), torch.arange(length, device=device)
    return sees(0, 0, rows[:, None], places)


def additive(is_visible: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask (1, 1, R, C) that a model adds to its scores."""
    mask = torch.zeros(is_visible.shape, dtype=dtype, device=is_visible.device)
    return mask.masked_fill(~is_visible, torch.finfo(dtype).min)[None, None]


def sparse_mask(is_visible: Tensor, sees: Visibility, num_heads: int = 1) -> BlockMask:
    """The mask for FlexAttention of what rows see (R, C), the rows of ``num_heads`` heads behind each other."""
    num_rows, length = is_visible.shape
    blocks = F.pad(is_visible, (0, -length % BLOCK)).unflatten(1, (-1, BLOCK))
    return block_mask(blocks.any(-1).any(0), blocks.all(-1).all(0), sees, num_heads * num_rows, length)


# ---- attention without copies of the keys


def has_flex_attention(model: Any) -> bool:
    """Whether a model can attend by FlexAttention in place of sdpa."""
    implementation = str(model.config._attn_implementation).removesuffix("_bitwise")
    return implementation == "sdpa" and getattr(model, "_supports_flex_attn", False)


def num_folded(config: Any) -> int:
    """How many query heads `attend` makes rows of one head: 1, or all that share a key head."""
    num_heads = config.num_attention_heads
    num_key_heads = getattr(config, "num_key_value_heads", None) or num_heads
    return 1 if _is_power_of_2(num_heads) else num_heads // num_key_heads


def _is_power_of_2(number: int) -> bool:
    return not number & (number - 1)


@contextmanager
def flex_attention(config: Any) -> Iterator[None]:
    """Let a model attend by `attend` inside the ``with`` block."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flex_attention_mask

    AttentionInterface.register(FLEX, attend)
    AttentionMaskInterface.register(FLEX, flex_attention_mask)
    implementation, config._attn_implementation = config._attn_implementation, FLEX
    try:
        yield
    finally:
        config._attn_implementation = implementation


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: BlockMask, **options: Any
) -> tuple[Tensor, None]:
    """FlexAttention of H heads over K key heads, as transformers calls it: (1, H, R, d), (1, K, C, d), (1, K, C, e).

    It groups query heads only in powers of 2, and transformers would copy the keys for each head of the others. Here
    these are rows of one head. Returns (1, R, H, e).
    """
    from transformers.integrations.flex_attention import flex_attention_forward

    (_, num_heads, num_rows, _), num_key_heads = query.shape, key.shape[1]
    if query.is_cuda:
        options["kernel_options"] = flex_options(num_heads // num_key_heads * num_rows)
    if _is_power_of_2(num_heads):
        return flex_attention_forward(module, query, key, value, attention_mask, **options)[0], None
    folded = query.unflatten(1, (num_key_heads, -1)).flatten(2, 3)  # (1, K, H / K * R, d)
    mixed = flex_attention_forward(module, folded, key, value, attention_mask, **options)[0]  # (1, H / K * R, K, e)
    return mixed.unflatten(1, (-1, num_rows)).permute(0, 2, 3, 1, 4).flatten(2, 3), None


# ---- one function for all layers


def compiled(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Compile a function for tensors of fixed shapes, as one graph with this name."""
    # torch keeps the graphs of a code object together and compiles at most eight, so each shape has a copy of its own.
    copy: Any = FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)
    options: dict[str, Any] = {}
    if BACKEND == "inductor":  # which rounds less often than eager steps unless it is told to emulate them
        options["options"] = {"emulate_precision_casts": True}
    return torch.compile(copy, fullgraph=True, dynamic=False, backend=BACKEND, **options)


def run_layer(layer: Any, name: str, keys: Tensor, values: Tensor, slots: Tensor, args: Any, kwargs: Any) -> Any:
    """Run a decoder layer over the fed rows; its cache of this name has the keys and values of this layer alone.

    All layers of a kind share one compiled function: the number of a layer is 0, and its weights are inputs.
    """
    # A model that was once asked for hidden states keeps hooks that read this; torch can trace that once it is set.
    token = _active_collector.set(None)
    result = type(layer).forward(layer, *args, **kwargs, **{name: StepCache([(keys, values)], slots)})
    _active_collector.reset(token)
    return result


@contextmanager
def own_layers(
    model: Any, views: Sequence[tuple[Tensor, Tensor]], slots: Tensor, function: Callable[..., Any] | None
) -> Iterator[None]:
    """Let the decoder layers of a model run by a function like `run_layer` inside the ``with`` block."""
    layers: Any = getattr(model.base_model, "layers", ())
    if function is None or any("forward" in vars(layer) for layer in layers):
        yield
        return
    numbered = [(module, module.layer_idx) for module in layers.modules() if hasattr(module, "layer_idx")]

    def forward(layer: Any, view: tuple[Tensor, Tensor], *args: Any, **kwargs: Any) -> Any:
        name = cache_name(type(layer))
        kwargs.pop(name)
        return function(layer, name, *view, slots, args, kwargs)

    try:
        for module, _ in numbered:
            module.layer_idx = 0
        for layer, view in zip(layers, views, strict=True):
            layer.forward = partial(forward, layer, view)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)
        for module, index in numbered:
            module.layer_idx = index


# ---- the cache


class _StepLayer(DynamicLayer):
    """One layer of a `StepCache`."""

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        self.keys, self.values, self.slots, self.is_initialized = keys, values, slots, True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write keys (1, H, R, d) and values (1, H, R, e) to their slots, and return those of all C positions."""
        self.keys.index_copy_(2, self.slots, key_states)  # type: ignore[union-attr]  # transformers may set None
        self.values.index_copy_(2, self.slots, value_states)  # type: ignore[union-attr]
        return self.keys, self.values  # type: ignore[return-value]

    def get_seq_length(self) -> Tensor:  # type: ignore[override]
        """Number of positions before the step, as a tensor: one graph serves all of them."""
        return self.slots[0]


class StepCache(Cache):
    """What a step sees of a cache: all positions of each layer, of which it writes those of ``slots`` (R,)."""

    def __init__(self, views: Sequence[tuple[Tensor, Tensor]], slots: Tensor) -> None:
        super().__init__(layers=[_StepLayer(keys, values, slots) for keys, values in views])
