"""A runner whose decoding steps are compiled: rows and cache are padded to few shapes, one graph for each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from data.files import cause_of
from drafters.protocol import RequiredOutputs
from drafters.tree import DraftTree
from inference.compiled.cache import LengthBuckets, StepCache
from inference.compiled.step import SLOTS, VISIBLE, compile_fixed, run_step, step_inputs
from inference.verifier.base import Base
from inference.verifier.cache import CacheKind
from inference.verifier.examination import NOTHING, difference, examine_once, rounding_limits
from inference.verifier.layers import PackedLinear
from inference.verifier.runner import ForwardOutput, Runner

NUM_ROWS = (1, 5, 9, 17, 33, 65)  # the root, and drafts of 0, 4, 8, 16, 32, 64 nodes; forwards of more rows are eager


class _Graph:
    """One compiled step with all that it reads, at fixed addresses.

    Args:
        runner: The runner, whose cache has the length that the step reads.
        num_rows: Number of rows R.
        layers: The F layers whose hidden states are returned.
    """

    def __init__(self, runner: CompiledRunner, num_rows: int, layers: tuple[int, ...]) -> None:
        length, device = runner.cache.capacity, runner.device
        self._inputs = torch.zeros(VISIBLE + num_rows, num_rows, dtype=torch.long, device=device)
        torch._dynamo.mark_static_address(self._inputs, guard=False)
        cache = StepCache(runner.cache.views, self._inputs[SLOTS])
        self._arguments = runner.causal_lm, self._inputs, cache, length, runner.spans, runner.dtype, layers
        self._run = compile_fixed(run_step, f"step_of_{num_rows}_rows_behind_{length}", device)
        self._is_captured = device.type == "cuda"

    def __call__(self, pending: Sequence[int], tree: DraftTree, start: int) -> tuple[Tensor, Tensor | None]:
        """Return logits (1 + M, V) and hidden states (P + M, F * D) or None, as `ForwardOutput` has them."""
        self._inputs.copy_(torch.from_numpy(step_inputs(pending, tree, start, self._inputs.shape[1])))
        logits, hidden = self._run(*self._arguments)
        num_fed, root = len(pending) + len(tree), len(pending) - 1
        logits, hidden = logits[root:num_fed], hidden if hidden is None else hidden[:num_fed]
        if self._is_captured:  # the next replay of a CUDA graph overwrites its outputs
            return logits.clone(), hidden if hidden is None else hidden.clone()
        return logits, hidden


class CompiledRunner(Runner):
    """A `Runner` that compiles its steps; long prompts and trees of more than 64 nodes are run as by its parent class.

    The fed tokens are padded to one of `NUM_ROWS` and the cache to one of the lengths of `LengthBuckets`. Each
    combination that occurs is compiled at its first use, which takes seconds, and once more for each set of hidden
    layers that drafters require. Its first result is compared with that of the eager forward.

    Args:
        base: A causal language model as in `Runner`.

    Raises:
        ValueError: As `Runner`; or the base cannot be compiled as one graph. Where only the hidden states of a drafter
            cannot, `forward` raises it.
    """

    def __init__(self, base: Base) -> None:
        super().__init__(base)
        self.causal_lm, self.spans = self._causal_lm, self._spans
        self._cache = self.cache = LengthBuckets(self.causal_lm.config.num_hidden_layers)
        self._graphs: dict[tuple[int, int, tuple[int, ...]], _Graph] = {}
        super().forward([0], DraftTree(), NOTHING)  # allocates the cache
        self.reset()
        self.forward([0], DraftTree(), NOTHING)
        self.reset()
        if base.check:
            examine_once(base.model, (self.state, "compiled"), lambda: self)

    @torch.inference_mode()
    def forward(self, pending: Sequence[int], tree: DraftTree, required_outputs: RequiredOutputs) -> ForwardOutput:
        place = bisect_left(NUM_ROWS, len(pending) + len(tree))
        if place == len(NUM_ROWS):
            return super().forward(pending, tree, required_outputs)
        num_rows, layers = NUM_ROWS[place], required_outputs.hidden_layers
        self._num_pending = len(pending)
        self.cache.fit(self.cached + num_rows)
        key = num_rows, self.cache.capacity, layers
        if key not in self._graphs:
            return self._first_forward(key, pending, tree)
        return ForwardOutput(*self._graphs[key](pending, tree, self.cached))

    def _first_forward(
        self, key: tuple[int, int, tuple[int, ...]], pending: Sequence[int], tree: DraftTree
    ) -> ForwardOutput:
        """Compile a step, and compare its first result with that of the eager forward."""
        expected = self._forward(pending, tree, key[2])
        self.rollback()
        name, hint = self.base.name, "leave out --compile or compile=True"
        try:
            graph = _Graph(self, key[0], key[2])
            got = ForwardOutput(*graph(pending, tree, self.cached))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # torch's compilers raise errors of many types
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error  # torch wraps its backend's
            raise ValueError(
                f"{name} cannot be compiled ({type(cause).__name__}: {cause_of(cause)}): {hint}"
            ) from error
        found = difference(got.logits, expected.logits)
        if got.hidden is not None and expected.hidden is not None:
            found = float(np.max([found, difference(got.hidden, expected.hidden)]))  # NaN stays NaN
        if not found <= (limit := rounding_limits(self.base.model, got.logits.dtype)[1]):
            raise ValueError(
                f"{name} cannot be compiled: the outputs of a compiled step differ from those of the eager one by "
                f"{found:.2g} of their spread, rounding by {limit:.2g} at most: {hint}"
            )
        self._graphs[key] = graph
        return got


def make_runner(base: Base, compile: bool = False, cache: CacheKind = "static") -> Runner:
    """Make a runner of a base.

    Args:
        base: The base.
        compile: Whether decoding steps are compiled.
        cache: Kind of the KV cache of a runner that is not compiled.

    Raises:
        ValueError: The runner cannot run this base, or a compiled runner is asked for with a dynamic cache or packed
            weights.
    """
    if not compile:
        return Runner(base, cache)
    if any(isinstance(module, PackedLinear) for module in base.model.modules()):
        raise ValueError(
            f"{base.name} has packed weights, which compiled steps cannot use: leave out compile or packed"
        )
    if cache != "static":
        raise ValueError(f"a compiled runner has a static cache, not a {cache} one: leave out cache or compile")
    return CompiledRunner(base)
