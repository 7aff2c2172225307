"""The time of a single decoding step with a draft tree of any size."""

from __future__ import annotations

import heapq
import time

import numpy as np
import torch

from drafters.protocol import RequiredOutputs
from drafters.tree import ROOT, DraftTree
from inference.verifier.runner import Runner

CHILD_PROBABILITY = 0.6  # of a first child; each further sibling gets this share of the remaining probability
NUM_WARMUP_STEPS = 3  # for each size


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
