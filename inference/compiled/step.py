"""A decoding step of fixed shape: R rows behind a cache of C positions, as a function of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from drafters.tree import DraftTree
from inference.compiled.cache import StepCache
from inference.verifier.layers import run_base

BACKEND = "inductor"
IDS, POSITIONS, SLOTS, VISIBLE = 0, 1, 2, 3  # rows of the inputs; from the last on, what each fed row sees


def step_inputs(pending: Sequence[int], tree: DraftTree, start: int, num_rows: int) -> np.ndarray:
    """Return what a step reads, one array (3 + R, R) for one copy to the device.

    Its rows are the token ids, their positions and their slots in the cache, then the fed rows that each fed row sees.
    The rows behind the P pending tokens and the M nodes repeat the root: nobody sees them, and what they write lies
    behind the text.

    Args:
        pending: P decided tokens that are not cached yet; the last is the root.
        tree: M nodes below the root.
        start: Number of cached positions.
        num_rows: Number of rows R, at least P + M.
    """
    num_padded, root = num_rows - len(pending) - len(tree), start + len(pending) - 1
    inputs = np.empty((VISIBLE + num_rows, num_rows), np.int64)
    inputs[IDS] = [*pending, *tree.tokens, *[pending[-1]] * num_padded]
    inputs[POSITIONS] = [*range(start, root + 1), *(root + depth for depth in tree.depths), *[root] * num_padded]
    inputs[SLOTS] = range(start, start + num_rows)
    inputs[VISIBLE:] = _visible(len(pending), tuple(tree.parents), num_rows)
    return inputs


@lru_cache(maxsize=256)  # chains and lookahead windows look the same in every step
def _visible(num_pending: int, parents: tuple[int, ...], num_rows: int) -> np.ndarray:
    """The fed rows (R, R) that each fed row sees."""
    num_fed = num_pending + len(parents)
    visible = np.zeros((num_rows, num_rows), bool)
    visible[:num_pending] = np.tri(num_pending, num_rows, dtype=bool)
    visible[num_pending:, :num_pending] = True
    visible[num_pending:num_fed, num_pending:num_fed] = DraftTree(parents, parents).ancestor_mask()
    return visible


def step_masks(inputs: Tensor, length: int, spans: Mapping[str, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the additive attention mask (1, 1, R, C) for each kind of attention in the base.

    Args:
        inputs: (3 + R, R), see `step_inputs`.
        length: Number of positions C of the cache.
        spans: Positions that a window or chunk has, by kind; see `layers.attention_spans`.
        dtype: Dtype of the masks.
    """
    positions, slots, visible = inputs[POSITIONS], inputs[SLOTS], inputs[VISIBLE:].bool()
    places = torch.arange(length, device=inputs.device)
    is_visible = places.new_zeros(len(slots), length, dtype=torch.bool).index_copy(1, slots, visible)
    is_visible = is_visible | (places < slots[0])
    key_positions = places.index_copy(0, slots, positions)
    masks = {}
    for kind, span in spans.items():
        is_near = is_visible
        if span <= length:
            chunk = positions - positions % span
            first_visible = chunk if kind == "chunked_attention" else positions - span + 1
            is_near = is_visible & (key_positions >= first_visible[:, None])
        masks[kind] = torch.zeros(is_near.shape, dtype=dtype, device=inputs.device).masked_fill(
            ~is_near, torch.finfo(dtype).min
        )[None, None]
    return masks


def run_step(
    model: nn.Module,
    inputs: Tensor,
    cache: StepCache,
    length: int,
    spans: Mapping[str, int],
    dtype: torch.dtype,
    layers: tuple[int, ...],
) -> tuple[Tensor, Tensor | None]:
    """Run the base on R rows; the function that is compiled.

    Args:
        model: The base.
        inputs: (3 + R, R), see `step_inputs`.
        cache: Keys and values of C positions; the R rows are written to their slots.
        length, spans, dtype: As in `step_masks`.
        layers: The F layers whose hidden states are returned, as in `run_base`.

    Returns:
        Logits (R, V), and the hidden states (R, F * D) or None without layers.
    """
    masks = step_masks(inputs, length, spans, dtype)
    ids, positions = inputs[IDS : IDS + 1], inputs[POSITIONS : POSITIONS + 1]
    logits, states = run_base(model, ids, positions, masks, cache, None, layers)
    return logits, torch.cat([states[layer][0] for layer in layers], dim=-1) if layers else None


def compile_fixed(function: Callable[..., Any], name: str, device: torch.device) -> Callable[..., Any]:
    """Compile a function that is always called with tensors of the same shapes, as one graph.

    On a GPU the graph is captured by CUDA graphs.

    Args:
        function: The function.
        name: Name of the graph, for torch's logs.
        device: Device of its tensors.
    """
    # torch keeps the graphs of a code object together and compiles at most eight, so each shape has a copy of its own.
    own: Any = FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)
    captured = BACKEND == "inductor" and device.type == "cuda"
    options: dict[str, Any] = {"mode": "reduce-overhead"} if captured else {}
    return torch.compile(own, fullgraph=True, dynamic=False, backend=BACKEND, **options)
