"""What the host does in a step of each drafter: operators that it launches, copies to the device, and waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness import ResultTable, main, random_llama
from benchmarks.training_speed import drafter_recipe
from drafters import NoDrafter, recipe
from drafters.nn import graph
from drafters.protocol import Drafter
from drafters.tree import DraftTree
from inference.verifier.attention import kept_mask
from inference.verifier.base import Base
from inference.verifier.graphed import GraphRunner
from inference.verifier.runner import Runner
from inference.verifier.sampling import Greedy
from inference.verifier.session import Session

CONFIGS = {
    "none": None,
    "CTC, `ctc.yaml`": "ctc.yaml",
    "CTC, `llama3_8b.yaml`": "llama3_8b.yaml",
    "block": "block.yaml",
    "Medusa": "medusa.yaml",
    "Hydra++": "hydra.yaml",
    "EAGLE": "eagle.yaml",
    "EAGLE-3": "eagle3.yaml",
}
BASE, DRAFT, REST = "base step", "draft", "rest"
TO_DEVICE, WAITS = "copies to the device", "waits"
PROMPT_LENGTH, NUM_WARM_UP, NUM_STEPS = 300, 3, 3
# What returns a view, allocates without writing, or reads a number: nothing is launched for it.
VIEWS = """
    _local_scalar_dense _reshape_alias _unsafe_view alias as_strided chunk detach diagonal empty empty_like
    empty_strided expand expand_as flatten is_inference item lift_fresh mT narrow new_empty numel permute
    reshape resolve_conj resolve_neg select size slice split split_with_sizes squeeze t transpose unbind unflatten
    unsafe_split unsqueeze view view_as
"""


class Launches(TorchDispatchMode):
    """Counts the operators that compute or copy something in its ``with`` block, and the graphs that are replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.graphs = 0
        self._in_graph, self._views = False, frozenset(VIEWS.split())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += not self._in_graph and function.__name__.partition(".")[0] not in self._views
        return function(*args, **(kwargs or {}))

    def captured(self, function: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
        """Stands in for `graph.captured`: each call counts as one graph."""

        def replay() -> Any:
            self.graphs, self._in_graph = self.graphs + 1, True
            try:
                return function()
            finally:
                self._in_graph = False

        return replay


class TakesDrafts(Greedy):
    """Takes the last child of every node for the base's choice, so that each step accepts a path."""

    def accept(self, tree: DraftTree, decisions: list[list[int]]) -> tuple[list[int], list[int]]:
        for node in range(tree.num_candidates):
            decisions[1 + tree.parents[node]][0] = tree.tokens[node]
        return super().accept(tree, decisions)


def launches() -> None:
    """Print the tables of operators, copies and waits of a decoding step that docs/design.md shows."""
    for graphed in (False, True):
        print(table(graphed).markdown())


def table(graphed: bool) -> ResultTable:
    """The table of eager or of graphed steps and drafts; a base's width and vocabulary do not change the counts."""
    base = random_llama("8b/16", 4000, "bfloat16", torch.device("cpu"))
    columns = [BASE, DRAFT, REST, TO_DEVICE, WAITS]
    result = ResultTable("In CUDA graphs" if graphed else "Eager", ["drafter", *columns])
    for name, config in CONFIGS.items():
        counts = count_operators(base, config, graphed) | count_copies(config, graphed)
        result.rows.append([name, *(counts[column] for column in columns)])
    result.notes.append(
        f"Base of 32 layers, a step behind {PROMPT_LENGTH} tokens that accepts a path; the most of {NUM_STEPS} steps. "
        "Base step: the forward over root and draft tree; draft: `propose`; rest: accept, commit, observe. Operators "
        "that compute or copy, without views; in CUDA graphs: replayed graphs + operators."
    )
    return result


def count_operators(base: Base, config: str | None, graphed: bool) -> dict[str, str]:
    """Operators of a step by part, as text; in graphs as the number of graphs and of the operators beside them."""
    counter, parts = Launches(), {"propose": DRAFT, "forward": BASE, "_accept": REST, "commit": REST, "observe": REST}
    most: Counter[tuple[str, bool]] = Counter()
    with patch.object(graph, "captured", counter.captured):
        session = _session(base, config, graphed)
        for _ in range(NUM_WARM_UP):
            session.step(session.runner.context_length)
        now: Counter[tuple[str, bool]] = Counter()

        def counted(function: Callable[..., Any], part: str) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                before = counter.operators, counter.graphs
                with counter:
                    result = function(*args)
                now[part, False] += counter.operators - before[0]
                now[part, True] += counter.graphs - before[1]
                return result

            return run

        for name, part in parts.items():
            owner = next(each for each in (session, session.runner, session.drafter) if hasattr(each, name))
            setattr(owner, name, counted(getattr(owner, name), part))
        for _ in range(NUM_STEPS):
            now.clear()
            session.step(session.runner.context_length)
            most |= now
    replayed = {part: f"{most[part, True]} + " if graphed else "" for part in parts.values()}
    return {part: f"{replayed[part]}{most[part, False]}" for part in parts.values()}


def count_copies(config: str | None, graphed: bool) -> dict[str, str]:
    """Copies of a step to the device and from it, as text: the host waits for each of the latter."""
    base = random_llama("grouped", 256, "float32", torch.device("cpu"))
    kept_mask.cache_clear()  # the masks of trees that this process has seen would need no copy
    with import_module("tests.devices.pretend").Accelerator() as accelerator:
        session = _session(replace(base, model=base.model.to(accelerator.device)), config, graphed)
        for _ in range(NUM_WARM_UP):
            session.step(session.runner.context_length)
        copies = []
        for _ in range(NUM_STEPS):
            accelerator.take_copies()
            session.step(session.runner.context_length)
            copies.append(accelerator.take_copies())
    return {WAITS: str(max(len(each) for each, _ in copies)), TO_DEVICE: str(max(len(each) for _, each in copies))}


def _session(base: Base, config: str | None, graphed: bool) -> Session:
    """A session of an untrained drafter that has begun a random text."""
    runner = GraphRunner(base) if graphed else Runner(base)
    drafter: Drafter = NoDrafter()
    if config:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            kind, arguments = drafter_recipe(config, base.shape.num_layers)
            drafter = recipe.build(kind, base.shape, arguments).to(base.model.dtype).eval().requires_grad_(False)
        drafter.to(base.model.device).initialise(base.base_weights)
        base.lend_weights_to(drafter)
    session = Session(runner, drafter, TakesDrafts())
    prompt = np.random.default_rng(0).integers(0, base.shape.vocab_size, PROMPT_LENGTH).tolist()
    session.begin(prompt, reserve=2 * PROMPT_LENGTH)
    return session


if __name__ == "__main__":
    main(launches)
