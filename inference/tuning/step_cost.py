"""``drafters step-cost``: measure the time of a decoding step by the number of draft tree nodes that the base reads."""

from __future__ import annotations

import heapq
import json
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from data.files import write_text
from drafters.protocol import RequiredOutputs
from drafters.tree import ROOT, DraftTree
from inference.outputs import new_file
from inference.verifier.options import ModelOptions
from inference.verifier.runner import Runner

CHILD_PROBABILITY = 0.6  # of a first child; each further sibling gets this share of the remaining probability
NUM_WARMUP_STEPS = 3  # for each size


def step_cost(
    model: ModelOptions,
    out: str,
    max_nodes: int = 64,
    context: int = 256,
    repeats: int = 20,
    overwrite: bool = False,
) -> None:
    """Measure the time of a step by the size of the draft tree, for drafters that choose the size themselves.

    A step consists of the base's forward over the root and the nodes, the choice of the tokens, their copy to the host,
    and the update of the KV cache.

    Args:
        model: The base.
        out: JSON file to write.
        max_nodes: Maximum number of nodes; 0, 1, 2, 4, ... and this number are measured.
        context: Number of cached tokens before the step.
        repeats: Number of timed steps for each size, after three untimed ones; the median is reported.
        overwrite: Replace an existing file.
    """
    if min(max_nodes, context, repeats) < 1:
        raise ValueError(f"max_nodes, context and repeats must be at least 1, not {max_nodes}, {context} and {repeats}")
    path = new_file(out, overwrite)
    loaded = model.load()
    if context + 1 + max_nodes > loaded.context_length:
        raise ValueError(
            f"context, root and nodes are {context + 1 + max_nodes} tokens, but the context of {model.base} ends at "
            f"{loaded.context_length}: pass a smaller --context or --max-nodes"
        )
    runner = Runner(loaded)
    nodes = sizes(max_nodes)
    seconds = measure(runner, nodes, context, repeats)
    write(path, model, context, runner.device, nodes, seconds)
    for count, second in zip(nodes, seconds, strict=True):
        print(f"{count:>5} nodes  {1e3 * second:9.3f} ms  {second / seconds[0]:.2f}×")
    print(f"wrote {out}")


def write(
    path: Path, model: ModelOptions, context: int, device: torch.device, nodes: list[int], seconds: list[float]
) -> None:
    """Write the measured times as JSON."""
    record = {
        "base": model.base,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "dtype": model.dtype,
        "threads": torch.get_num_threads(),
        "context": context,
        "nodes": nodes,
        "seconds": seconds,
    }
    write_text(path, json.dumps(record, indent=2) + "\n")


def sizes(max_nodes: int) -> list[int]:
    """Return the numbers of nodes to measure: zero, the powers of two, and the largest.

    >>> sizes(12)
    [0, 1, 2, 4, 8, 12]
    """
    return [0, *(2**power for power in range(max_nodes.bit_length()) if 2**power < max_nodes), max_nodes]


def measure(runner: Runner, nodes: list[int], context: int, repeats: int) -> list[float]:
    """Return the median seconds of a step for each number of nodes; no node is accepted.

    The sizes alternate, starting with another one each time, so that a machine that slows down affects all alike.
    """
    trees = [bushy(count, runner.vocab_size) for count in nodes]
    prefill(runner, context, max(nodes) + 1)
    for tree in trees:
        for _ in range(NUM_WARMUP_STEPS):
            step_seconds(runner, tree, context)
    seconds: list[list[float]] = [[] for _ in nodes]
    for repeat in range(repeats):
        for shift in range(len(nodes)):
            size = (repeat + shift) % len(nodes)
            seconds[size].append(step_seconds(runner, trees[size], context))
    return [median(times) for times in seconds]


def prefill(runner: Runner, context: int, reserve: int) -> None:
    """Cache ``context`` random tokens, and reserve space for ``reserve`` more."""
    tokens = np.random.default_rng(1).integers(0, runner.vocab_size, context).tolist()
    runner.reset(context + reserve)
    runner.forward(tokens, DraftTree(), RequiredOutputs())
    runner.commit([])


def step_seconds(runner: Runner, tree: DraftTree, context: int) -> float:
    """Return the seconds of one step, and restore the cache."""
    _wait(runner.device)
    started = time.perf_counter()
    output = runner.forward([1], tree, RequiredOutputs())
    output.logits.argmax(-1).tolist()
    runner.commit([])
    _wait(runner.device)
    seconds = time.perf_counter() - started
    runner.truncate(context)
    return seconds


def bushy(num_nodes: int, vocab_size: int) -> DraftTree:
    """Return the most probable nodes of an infinite tree with the child probabilities of a good drafter."""
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
