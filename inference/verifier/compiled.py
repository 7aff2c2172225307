"""Compiled steps: rows and cache are padded to a few fixed shapes, and torch.compile makes one graph of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer
from transformers.utils.output_capturing import _active_collector

from drafters.tree import DraftTree
from inference.verifier.attention import Fed, first_visible, visible_rows
from inference.verifier.base import Base
from inference.verifier.cache import BufferCache
from inference.verifier.check import check_config, check_once, difference, rounding_limits, usual_tokens
from inference.verifier.draft_model import DraftRunner
from inference.verifier.layers import cache_name, run_base
from inference.verifier.packed import PackedLinear
from inference.verifier.row_multiples import row_multiple
from inference.verifier.runner import ForwardOutput, Runner

BACKEND = "inductor"
SHORTEST = 512  # positions of the smallest cache; each larger one is twice as long
NUM_ROWS = (1, 5, 9, 17, 33, 65)  # the root, and drafts of 0, 4, 8, 16, 32, 64 nodes; forwards of more rows are eager
IDS, POSITIONS, SLOTS, VISIBLE = 0, 1, 2, 3  # rows of the inputs; from the last on, what each fed row sees


def make_runner(base: Base, compile: bool = False, vocab_size: int | None = None) -> Runner:
    """Make a runner of a base, whose decoding steps may be compiled; of a draft model, for a base of ``vocab_size``.

    Raises ValueError if the runner cannot run this base, if the logits of a draft tree would not be the base's own
    (`check_base` runs for the first runner of a model, and again when the model has changed), or if a compiled runner
    is asked for with packed weights.
    """
    check_config(base)
    if compile:
        if any(isinstance(module, PackedLinear) for module in base.model.modules()):
            raise ValueError(f"{base.name} has packed weights, which compiled steps cannot use: leave out one of both")
        if base.bitwise:
            raise ValueError(f"{base.name} has no bit-identical rows in compiled steps: leave out one of the two")
        if base.check:
            check_once(base)
        return CompiledRunner(base)
    runner = Runner(base) if vocab_size in (None, base.config.vocab_size) else DraftRunner(base, vocab_size)
    if base.wants_bitwise:
        runner.row_multiple = row_multiple(runner)
        if base.bitwise and runner.row_multiple is None:
            raise ValueError(f"{base.name} has no bit-identical rows here: leave out --bitwise or bitwise=True")
    if base.check:
        check_once(base, runner.row_multiple)
    return runner


class CompiledRunner(Runner):
    """A `Runner` that compiles its steps; long prompts and trees of more than 64 nodes are run as by its parent class.

    The fed tokens are padded to one of `NUM_ROWS` and the cache to 512, 1024, ... positions. Each combination that
    occurs is compiled at its first use, which takes seconds, and once more for each set of hidden layers that drafters
    require. Its first result is compared with that of the eager forward.

    Raises ValueError if the base cannot be compiled as one graph. Where only the hidden states of
    a drafter cannot, `forward` raises it.
    """

    @torch.inference_mode()
    def __init__(self, base: Base) -> None:
        super().__init__(base)
        config = self.causal_lm.config
        self.cache = FixedCache(config.num_hidden_layers, SHORTEST)
        self._graphs: dict[tuple[int, int, tuple[int, ...]], _Graph] = {}  # by rows, positions and hidden layers
        *text, last = usual_tokens(config, 5)  # the states of a first token alone can be too large to compare
        super()._forward(text, DraftTree(), ())  # allocates the cache
        self.commit([])
        self._forward([last], DraftTree(), ())
        self.reset()

    def _forward(self, pending: Sequence[int], tree: DraftTree, layers: Sequence[int]) -> ForwardOutput:
        num_fed, self._num_pending = len(pending) + len(tree), len(pending)
        num_rows = next((rows for rows in NUM_ROWS if rows >= num_fed), None)
        if num_rows is None:
            return super()._forward(pending, tree, layers)
        length = self.cache.capacity
        while length < self.cached + num_rows:
            length *= 2
        key = num_rows, length, tuple(layers)
        if key not in self._graphs:
            return self._first_forward(key, pending, tree)
        return self._graphs[key](self.causal_lm, pending, tree, self.cached)

    def _first_forward(
        self, key: tuple[int, int, tuple[int, ...]], pending: Sequence[int], tree: DraftTree
    ) -> ForwardOutput:
        """Compile a step, and compare its first result with that of the eager forward."""
        num_rows, length, layers = key
        if self.cache.capacity < length:
            self.cache.grow(length, *self.cache.views[0])
        # The graphs of a smaller cache are of no more use, and would keep its memory.
        self._graphs = {other: graph for other, graph in self._graphs.items() if other[1] == length}
        expected = super()._forward(pending, tree, layers)
        self.truncate(self.cached)
        refusal, hint = f"{self.base.name} cannot be compiled", "leave out --forward compiled or compile=True"
        try:
            graph = _Graph(self, num_rows, layers)
            got = graph(self.causal_lm, pending, tree, self.cached)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # torch's compilers raise errors of many types
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error  # torch wraps its backend's
            reason = " ".join(" ".join(str(cause).splitlines()[:2]).split())  # torch explains in its second line
            raise ValueError(f"{refusal} ({type(cause).__name__}: {reason}): {hint}") from error
        gap = difference(got.logits, expected.logits)
        if got.hidden is not None and expected.hidden is not None:
            gap = float(np.max([gap, difference(got.hidden, expected.hidden)]))  # NaN stays NaN
        if not gap <= (limit := rounding_limits(self.base.model, got.logits.dtype)[1]):
            raise ValueError(
                f"{refusal}: the outputs of a compiled step differ from those of the eager one by {gap:.2g} of their "
                f"spread, rounding by {limit:.2g} at most: {hint}"
            )
        self._graphs[key] = graph
        return got


class _Graph:
    """One compiled step of R rows with all that it reads at fixed addresses, but for the model."""

    def __init__(self, runner: CompiledRunner, num_rows: int, layers: tuple[int, ...]) -> None:
        length, device, self.num_rows = runner.cache.capacity, runner.base.model.device, num_rows
        self._inputs = torch.zeros(VISIBLE + num_rows, num_rows, dtype=torch.long, device=device)
        torch._dynamo.mark_static_address(self._inputs, guard=False)
        cache = StepCache(runner.cache.views, self._inputs[SLOTS])
        dtype = runner.base.model.dtype
        self._arguments = self._inputs, cache, length, runner.attention.spans, dtype, layers
        self._run = compile_fixed(run_step, f"step_of_{num_rows}_rows_behind_{length}", device)
        self._is_captured = device.type == "cuda"

    def __call__(self, model: nn.Module, pending: Sequence[int], tree: DraftTree, start: int) -> ForwardOutput:
        self._inputs.copy_(torch.from_numpy(step_inputs(pending, tree, start, self.num_rows)))
        logits, hidden = self._run(model, *self._arguments)
        num_fed, root = len(pending) + len(tree), len(pending) - 1
        logits, hidden = logits[root:num_fed], hidden if hidden is None else hidden[:num_fed]
        if self._is_captured:  # the next replay of a CUDA graph overwrites its outputs
            logits, hidden = logits.clone(), hidden if hidden is None else hidden.clone()
        return ForwardOutput(logits, hidden)


def compile_fixed(function: Callable[..., Any], name: str, device: torch.device) -> Callable[..., Any]:
    """Compile a function that is always called with tensors of the same shapes, as one graph with this name.

    On a GPU the graph is captured by CUDA graphs.
    """
    # torch keeps the graphs of a code object together and compiles at most eight, so each shape has a copy of its own.
    copy: Any = FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)
    options: dict[str, Any] = {}
    if BACKEND == "inductor":  # which rounds less often than eager steps unless it is told to emulate them
        options["options"] = {"emulate_precision_casts": True, "triton.cudagraphs": device.type == "cuda"}
    torch.compiler.assume_constant_result(cache_name)
    return torch.compile(copy, fullgraph=True, dynamic=False, backend=BACKEND, **options)


# ---- the step as a function of tensors


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


def step_masks(inputs: Tensor, length: int, spans: Mapping[str, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the additive attention mask (1, 1, R, C) for each kind of attention in the base.

    The ``inputs`` (3 + R, R) are those of `step_inputs`, ``length`` is the number of positions C of the cache, and
    ``spans`` those of `attention_spans`.
    """
    positions, slots, visible = inputs[POSITIONS], inputs[SLOTS], inputs[VISIBLE:].bool()
    places = torch.arange(length, device=inputs.device)
    is_visible = places.new_zeros(len(slots), length, dtype=torch.bool).index_copy(1, slots, visible)  # (R, C)
    is_visible = is_visible | (places < slots[0])
    key_positions = places.index_copy(0, slots, positions)
    masks = {}
    for kind, span in spans.items():
        is_near = is_visible
        if span <= length:
            is_near = is_visible & (key_positions >= first_visible(kind, span, positions)[:, None])
        mask = torch.zeros(is_near.shape, dtype=dtype, device=inputs.device)
        masks[kind] = mask.masked_fill(~is_near, torch.finfo(dtype).min)[None, None]
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
    """Run the base on R rows; the function that is compiled. The arguments are those of `step_masks` and `run_base`.

    Returns logits (R, V), and the hidden states (R, F * D) or None.
    """
    masks = step_masks(inputs, length, spans, dtype)
    fed = Fed(inputs[IDS : IDS + 1], inputs[POSITIONS : POSITIONS + 1], masks, cache)
    # A model that was once asked for hidden states keeps hooks that read this; torch can trace that once it is set.
    token = _active_collector.set(None)
    logits, states = run_base(model, fed, None, layers)
    _active_collector.reset(token)
    return logits, torch.cat([states[layer][0] for layer in layers], dim=-1) if layers else None


# ---- the cache


class FixedCache(BufferCache):
    """A `BufferCache` of 512, 1024, 2048, ... positions, whose tensors stay at their addresses until it grows."""

    def reserve(self, length: int) -> None:
        """Do nothing: steps read all positions of the cache, so it is no longer than the texts need."""

    def grow(self, length: int, keys: Tensor, values: Tensor) -> None:
        kept = self.capacity if self.views else 0
        while self.capacity < length:
            self.capacity *= 2
        super().grow(length, keys, values)
        assert self.buffer is not None
        self.buffer[..., kept:, :] = 0  # what is masked is multiplied by 0 and must be finite
        for states in (states for pair in self.views for states in pair):
            torch._dynamo.mark_static_address(states, guard=False)  # as transformers does, for CUDA graphs


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
    """What a compiled step sees of a cache: all positions of each layer, of which it writes those of ``slots`` (R,)."""

    def __init__(self, views: list[tuple[Tensor, Tensor]], slots: Tensor) -> None:
        super().__init__(layers=[_StepLayer(keys, values, slots) for keys, values in views])
