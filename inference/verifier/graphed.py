"""Graphed steps: the base over a fixed number of rows, captured in a CUDA graph that one launch replays.

A step feeds R rows, one of `NUM_ROWS`: the root, the draft tree, and copies of the root that nobody sees. All that
changes from step to step is in one array of integers (`step_inputs`), which goes to the device in one copy; the KV
cache and the outputs stay at their addresses. The decoder layers run as one compiled function for each number of rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafters.nn import graph
from drafters.protocol import Drafter
from drafters.tree import ROOT, DraftTree
from inference.verifier.base import Base
from inference.verifier.cache import FixedCache
from inference.verifier.check import check_config, check_once, difference, rounding_limits, usual_tokens
from inference.verifier.draft_model import DraftRunner
from inference.verifier.fixed_step import VISIBLE, compiled, run_layer, run_step, step_inputs
from inference.verifier.row_multiples import row_multiple
from inference.verifier.runner import ForwardOutput, Runner

NUM_ROWS = (1, 16, 32, 64)  # rows of a step in total: GPUs multiply tiles of 16, 32, 64
COMPILED_ON = frozenset(["cuda"])  # devices on which layers are compiled


def make_runner(base: Base, vocab_size: int | None = None) -> Runner:
    """Make a runner of a base, whose steps are graphed if it says so; of a draft model, for a base of ``vocab_size``.

    Raises ValueError if the runner cannot run this base, or if the logits of a draft tree would not be the base's own
    (`check_base` runs for the first runner of a model, and again when the model has changed).
    """
    check_config(base)
    vocab_size = vocab_size or base.config.vocab_size
    is_other = vocab_size != base.config.vocab_size
    if base.wants_graphs:
        if base.bitwise:
            raise ValueError(f"{base.name} has no bit-identical rows in graphed steps: leave out one of the two")
        if base.check:
            check_once(base)
        try:
            return GraphDraftRunner(base, vocab_size) if is_other else GraphRunner(base)
        except ValueError as error:
            if base.graphed:
                raise
            print(f"{error}: its steps are eager, which takes longer", file=sys.stderr)
    runner = DraftRunner(base, vocab_size) if is_other else Runner(base)
    if base.wants_bitwise:
        runner.row_multiple = row_multiple(runner)
        if base.bitwise and runner.row_multiple is None:
            raise ValueError(f"{base.name} has no bit-identical rows here: leave out --bitwise or bitwise=True")
    if base.check:
        check_once(base, runner.row_multiple)
    return runner


class GraphRunner(Runner):
    """A `Runner` whose steps of at most 64 rows are graphed; prompts are read as by its parent class.

    A graph is captured for each number of rows and each set of hidden layers, by `capture` before a text, and again if
    a text needs a longer cache. Its first result is compared with that of the eager forward. Logits and hidden states
    are overwritten by the next step. Without a GPU nothing is captured, and the same steps are called.

    Raises ValueError if the base cannot be captured; where only its hidden states cannot, `capture` raises it.
    """

    cache: FixedCache

    @torch.inference_mode()
    def __init__(self, base: Base) -> None:
        super().__init__(base)
        self.cache = FixedCache(base.config.num_hidden_layers, base.context_length + NUM_ROWS[-1])
        self._steps: dict[tuple[int, tuple[int, ...]], GraphedStep] = {}
        self._outputs: dict[tuple[int, ...], tuple[Tensor, Tensor | None]] = {}  # logits and hidden states, by layers
        self._layer_functions: dict[tuple[int, int], Callable[..., Any]] = {}  # by rows and positions of the cache
        self._capture(NUM_ROWS, ())

    def capture(self, drafter: Drafter) -> None:
        layers = tuple(drafter.required_outputs.hidden_layers)
        self._capture([num_rows for num_rows in NUM_ROWS if self._step(num_rows, layers) is None], layers)
        drafter.draft_in_graph(self.cache.capacity)

    @torch.inference_mode()
    def _capture(self, all_num_rows: Sequence[int], layers: tuple[int, ...]) -> None:
        """Capture steps of these numbers of rows, with a few tokens for a text; the cache must be empty."""
        if all_num_rows and self.base.model.device.type == "cuda":
            sizes = ", ".join(map(str, all_num_rows))
            print(f"capturing CUDA graphs of {self.base.name} for {sizes} rows", file=sys.stderr, flush=True)
        for num_rows in all_num_rows:
            # The states of a first token alone can be too large to compare.
            *text, root = usual_tokens(self.base.config, 4 + num_rows)[:5]
            tree = DraftTree([root] * (num_rows - 1), [ROOT] * (num_rows - 1))
            Runner._forward(self, text, DraftTree(), ())
            self.commit([])
            GraphRunner._forward(self, [root], tree, layers)
            self.reset()

    def most_nodes(self, length: int) -> int:
        """As many as fit into the largest graph beside the pending tokens; none is too many for a prompt."""
        return room if (room := NUM_ROWS[-1] - (length - self.cached)) >= 0 else super().most_nodes(length)

    def _forward(self, pending: Sequence[int], tree: DraftTree, layers: Sequence[int]) -> ForwardOutput:
        num_fed, self._num_pending = len(pending) + len(tree), len(pending)
        num_rows = next((rows for rows in NUM_ROWS if rows >= num_fed), None)
        if num_rows is None or not self.cache.views:
            return super()._forward(pending, tree, layers)
        self.cache.reserve(self.cached + num_rows)
        step = self._step(num_rows, tuple(layers))
        if step is None:
            return self._first_forward(num_rows, pending, tree, tuple(layers))
        return step(pending, tree, self.cached)

    def _step(self, num_rows: int, layers: tuple[int, ...]) -> GraphedStep | None:
        """The captured step, if there is one for the cache as long as it is."""
        step = self._steps.get((num_rows, layers))
        return step if step and step.capacity == self.cache.capacity else None

    def _first_forward(
        self, num_rows: int, pending: Sequence[int], tree: DraftTree, layers: tuple[int, ...]
    ) -> ForwardOutput:
        """Capture a step, and compare its first result with that of the eager forward."""
        self._steps = {key: step for key, step in self._steps.items() if step.capacity == self.cache.capacity}
        expected = super()._forward(pending, tree, layers)
        self.truncate(self.cached)
        refusal, hint = f"{self.base.name} cannot be graphed", "pass --forward eager or graphed=False"
        try:
            step = GraphedStep(self, num_rows, layers, expected)
            step.capture(pending, tree, self.cached)
            output = step(pending, tree, self.cached)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # torch's compilers raise errors of many types
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error  # torch wraps its backend's
            reason = " ".join(" ".join(str(cause).splitlines()[:2]).split())  # torch explains in its second line
            raise ValueError(f"{refusal} ({type(cause).__name__}: {reason}): {hint}") from error
        gap = difference(output.logits, expected.logits)
        if output.hidden is not None and expected.hidden is not None:
            gap = float(np.max([gap, difference(output.hidden, expected.hidden)]))  # NaN stays NaN
        if not gap <= (limit := rounding_limits(self.base.model, output.logits.dtype)[1]):
            raise ValueError(
                f"{refusal}: the outputs of a graphed step differ from those of the eager one by {gap:.2g} of their "
                f"spread, rounding by {limit:.2g} at most: {hint}"
            )
        self._steps[num_rows, layers] = step
        return output

    def outputs(self, layers: tuple[int, ...], like: ForwardOutput) -> tuple[Tensor, Tensor | None]:
        """Memory for the outputs of all steps with these hidden layers: logits (64, V), hidden states (64, F * D)."""
        if layers not in self._outputs:
            hidden = like.hidden if like.hidden is None else like.hidden.new_zeros(NUM_ROWS[-1], like.hidden.shape[1])
            self._outputs[layers] = like.logits.new_zeros(NUM_ROWS[-1], like.logits.shape[1]), hidden
        return self._outputs[layers]

    def layer_function(self, num_rows: int) -> Callable[..., Any] | None:
        """The compiled function that runs a decoder layer over so many rows; None for the layers' own forwards."""
        key = num_rows, self.cache.capacity
        if self.base.model.device.type in COMPILED_ON and key not in self._layer_functions:
            self._layer_functions[key] = compiled(run_layer, "layer_of_{}_rows_behind_{}".format(*key))
        return self._layer_functions.get(key)


class GraphDraftRunner(DraftRunner, GraphRunner):
    """A `DraftRunner` whose steps are graphed."""


class GraphedStep:
    """One step of R rows, with all that it reads and writes at fixed addresses, but for the model."""

    def __init__(self, runner: GraphRunner, num_rows: int, layers: tuple[int, ...], like: ForwardOutput) -> None:
        self.num_rows, self.capacity, self._runner, self._layers = num_rows, runner.cache.capacity, runner, layers
        self._inputs = graph.HostBuffer(VISIBLE + num_rows, num_rows, device=runner.base.model.device)
        self._outputs = runner.outputs(layers, like)

    def capture(self, pending: Sequence[int], tree: DraftTree, start: int) -> None:
        """Capture the step; running these tokens meanwhile, it writes nothing wrong into the cache."""
        self._inputs.numbers[:] = step_inputs(pending, tree, start, self.num_rows)
        self._inputs.send()
        self._graph = graph.captured(self._run, self._inputs.device.device)

    def _run(self) -> None:
        runner = self._runner
        results = run_step(
            runner.causal_lm,
            self._inputs.device,
            runner.cache.views,
            runner.attention.spans,
            self._layers,
            runner.layer_function(self.num_rows),
        )
        for memory, result in zip(self._outputs, results, strict=True):
            if memory is not None and result is not None:
                memory[: self.num_rows] = result

    def __call__(self, pending: Sequence[int], tree: DraftTree, start: int) -> ForwardOutput:
        self._inputs.numbers[:] = step_inputs(pending, tree, start, self.num_rows)
        self._inputs.send()
        self._graph()
        (logits, hidden), num_fed = self._outputs, len(pending) + len(tree)
        return ForwardOutput(logits[len(pending) - 1 : num_fed], hidden if hidden is None else hidden[:num_fed])
