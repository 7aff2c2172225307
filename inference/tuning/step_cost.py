"""``drafters step-cost``: the base's time for a step, by the nodes it feeds; what a draft tree's size is chosen by."""

from __future__ import annotations

import heapq
import json
import time
from statistics import median

import numpy as np
import torch

from drafters.protocol import RequiredOutputs
from drafters.tree import ROOT, DraftTree
from inference.engine.options import ModelOptions
from inference.engine.runner import Runner
from inference.runs.outputs import new_file

CHILD_PROBABILITY = 0.6  # of the first child; each further one has this share of what is left
WARMUP = 3  # steps of every size


def step_cost(
    model: ModelOptions,
    out: str,
    max_nodes: int = 64,
    context: int = 256,
    repeats: int = 20,
    overwrite: bool = False,
) -> None:
    """Measure what a step of the base costs by the nodes it feeds, for drafters that choose the size of their tree.

    A step is the forward over the root and its nodes, the choice of tokens, their copy to the host and the commit.

    Args:
        model: The base.
        out: JSON file to write.
        max_nodes: Most nodes fed; measured are 0, 1, 2, 4, ... and this.
        context: Tokens cached before the step.
        repeats: Steps of every size, of which the median counts; sizes in turn, after three each to warm up.
        overwrite: Replace a file that is already there.
    """
    if min(max_nodes, context, repeats) < 1:
        raise ValueError(f"max_nodes, context and repeats must be at least 1, not {max_nodes}, {context} and {repeats}")
    path = new_file(out, overwrite)
    loaded = model.load()
    if context + 1 + max_nodes > loaded.context_length:
        raise ValueError(
            f"context, root and nodes are {context + 1 + max_nodes} tokens, and the context of {model.base} ends at "
            f"{loaded.context_length}: pass a smaller --context or --max-nodes"
        )
    runner = Runner(loaded)
    nodes = sizes(max_nodes)
    seconds = measure(runner, nodes, context, repeats)
    place = torch.cuda.get_device_name(runner.device) if runner.device.type == "cuda" else runner.device.type
    about = {
        "base": model.base,
        "device": place,
        "dtype": model.dtype,
        "threads": torch.get_num_threads(),
        "context": context,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about | {"nodes": nodes, "seconds": seconds}, indent=2) + "\n", encoding="utf-8")
    for count, second in zip(nodes, seconds, strict=True):
        print(f"{count:>5} nodes  {1e3 * second:9.3f} ms  {second / seconds[0]:.2f}×")
    print(f"wrote {out}")


def sizes(max_nodes: int) -> list[int]:
    """Numbers of nodes to measure: none, the powers of two, and the largest.

    >>> sizes(12)
    [0, 1, 2, 4, 8, 12]
    """
    return [0, *(2**power for power in range(max_nodes.bit_length()) if 2**power < max_nodes), max_nodes]


def measure(runner: Runner, nodes: list[int], context: int, repeats: int) -> list[float]:
    """Median seconds of a step by the nodes it feeds, none of them accepted. The sizes take turns, another one first
    each time, so that a machine that grows slower meets all alike."""
    trees = [bushy(count, runner.vocab_size) for count in nodes]
    prefill(runner, context, max(nodes) + 1)
    for tree in trees:
        for _ in range(WARMUP):
            step_seconds(runner, tree, context)
    seconds: list[list[float]] = [[] for _ in nodes]
    for repeat in range(repeats):
        for turn in range(len(nodes)):
            size = (repeat + turn) % len(nodes)
            seconds[size].append(step_seconds(runner, trees[size], context))
    return [median(taken) for taken in seconds]


def prefill(runner: Runner, context: int, room: int) -> None:
    """Cache ``context`` random tokens, with room for so many behind them."""
    tokens = np.random.default_rng(1).integers(0, runner.vocab_size, context).tolist()
    runner.reset(context + room)
    runner.forward(tokens, DraftTree(), RequiredOutputs())
    runner.commit([])


def step_seconds(runner: Runner, tree: DraftTree, context: int) -> float:
    """Seconds of one step; what it cached is taken back."""
    _wait(runner.device)
    started = time.perf_counter()
    rows = runner.forward([1], tree, RequiredOutputs())
    rows.logits.argmax(-1).tolist()
    runner.commit([])
    _wait(runner.device)
    seconds = time.perf_counter() - started
    runner.truncate(context)
    return seconds


def bushy(num_nodes: int, vocab_size: int) -> DraftTree:
    """The most probable nodes of an endless tree whose children are as probable as a good drafter's: best-first."""
    parents: list[int] = []
    heap = [(-CHILD_PROBABILITY, ROOT, 0, 1.0)]  # -probability, parent, rank among its children, parent's probability
    while len(parents) < num_nodes:
        probability, parent, rank, above = heapq.heappop(heap)
        node, left = len(parents), (1 - CHILD_PROBABILITY) ** (rank + 1)
        parents.append(parent)
        heapq.heappush(heap, (-above * left * CHILD_PROBABILITY, parent, rank + 1, above))
        heapq.heappush(heap, (probability * CHILD_PROBABILITY, node, 0, -probability))
    rng, tokens = np.random.default_rng(0), np.empty(num_nodes, dtype=int)
    for parent in {*parents}:
        children = [node for node in range(num_nodes) if parents[node] == parent]
        tokens[children] = rng.choice(vocab_size, len(children), replace=False)  # siblings differ
    return DraftTree(tokens.tolist(), parents)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
