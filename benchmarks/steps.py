"""Time of a decoding step by the size of its draft tree, beside one in CUDA graphs or without bit-identical rows."""

from __future__ import annotations

import heapq
import time
from dataclasses import replace
from itertools import product
from statistics import median, quantiles
from typing import Literal

import numpy as np
import torch

from benchmarks.harness import SHAPES, ResultTable, alternate, main, num_millions, random_llama, show, times_bytes
from data.dtypes import Dtype
from drafters.protocol import RequiredOutputs
from drafters.tree import ROOT, DraftTree
from inference.verifier.base import Base, load_base, prepare_process, resolve_device
from inference.verifier.graphed import NUM_ROWS, make_runner
from inference.verifier.packed import pack_weights
from inference.verifier.runner import Runner

CHILD_PROBABILITY = 0.6  # of a first child; each further sibling gets this share of the remaining probability
NUM_WARMUP_STEPS = 3  # for each size
VOCAB_SIZE = 32_000  # of random bases
EAGER, GRAPHED, ROUNDED = "eager", "graphed", "rounded"


def steps(
    bases: list[str] = ["checkpoints/tiny-chat", "100m"],  # noqa: B006
    dtypes: list[Dtype] = ["float32", "bfloat16"],  # noqa: B006
    device: Literal["auto", "cpu", "cuda"] = "auto",
    nodes: list[int] = [0, 1, 2, 4, 8, 16, 32, 64],  # noqa: B006
    contexts: list[int] = [256],  # noqa: B006
    graphed: bool = False,
    rounded: bool = False,
    packed: bool = False,
    repeats: int = 50,
    out: str | None = None,
) -> None:
    """Measure a step as decoding runs it: forward, choice of the tokens, copy to the host, and cache update.

    Args:
        bases: Folders of bases, or shapes of random LLaMAs (tiny, 100m, 1b, 3b, 7b, 8b).
        dtypes: Dtypes of the weights.
        device: Device to run on; auto uses the GPU if there is one.
        nodes: Numbers of nodes, without the root.
        contexts: Numbers of cached tokens before the step.
        graphed: Also measure steps in CUDA graphs, of at most 63 nodes, in turns with the eager ones.
        rounded: Also measure steps without bit-identical rows.
        packed: Multiply by packed weights, as `--forward packed` does.
        repeats: Timed steps of every arm after three warm-up steps; the arms alternate.
        out: Markdown file to write the tables to.
    """
    if repeats < 2 or min(contexts) < 1 or min(nodes) < 0:
        raise ValueError("repeats must be at least 2, contexts at least 1, and nodes at least 0")
    if graphed and max(nodes) >= NUM_ROWS[-1]:
        raise ValueError(f"nodes must be at most {NUM_ROWS[-1] - 1}: larger steps do not run in CUDA graphs")
    prepare_process(torch_device := resolve_device(device), sums_alike=True)
    tables = []
    for name, dtype in product(bases, dtypes):
        base = (
            random_llama(name, VOCAB_SIZE, dtype, torch_device)
            if name in SHAPES
            else load_base(name, dtype, torch_device)
        )
        if max(contexts) + max(nodes) + 1 > base.context_length:
            raise ValueError(f"the context of {name} ends at {base.context_length}: pass smaller --contexts or --nodes")
        if packed:
            pack_weights(base.model)
        base = replace(base, graphed=False)
        runners = {EAGER: make_runner(base)}
        runners |= {GRAPHED: make_runner(replace(base, graphed=True))} if graphed else {}
        runners |= {ROUNDED: make_runner(replace(base, bitwise=False))} if rounded else {}
        trees = {count: bushy(count, base.model.config.vocab_size) for count in dict.fromkeys([0, *nodes])}
        for context in contexts:
            title = f"{base.name} ({num_millions(base)}), {dtype}, {torch_device.type}, context {context}"
            tables.append(measure(title, base, runners, trees, context, repeats))
    show(tables, torch_device, out)


def measure(
    title: str,
    base: Base,
    runners: dict[str, Runner],
    trees: dict[int, DraftTree],
    context: int,
    repeats: int,
    bandwidth: float | None = None,
) -> ResultTable:
    """Time the steps of all runners behind one context, and check that they compute the same.

    With a bandwidth, in bytes a second, each time stands beside that in which the step can read its bytes.
    """
    seconds: dict[tuple[str, int], list[float]] = {arm: [] for arm in product(runners, trees)}
    first_seconds, expected = {}, None
    prompt = np.random.default_rng(1).integers(0, base.config.vocab_size, context).tolist()
    for kind, runner in runners.items():
        runner.reset(context + max(trees) + 1)
        runner.forward(prompt, DraftTree(), RequiredOutputs())
        runner.commit([])
        for count, tree in trees.items():
            started = time.perf_counter()
            root = runner.forward([1], tree, RequiredOutputs()).logits[0].float()
            first_seconds[kind, count] = time.perf_counter() - started
            runner.truncate(context)
            expected = root if expected is None else expected
            if base.model.dtype == torch.float32:
                assert torch.allclose(root, expected, 1e-3, 1e-3), f"{count} nodes change the root's logits"
            for _ in range(NUM_WARMUP_STEPS):
                step_seconds(runner, tree, context)
    for _, _, (kind, count) in alternate(list(seconds), 1, repeats, title):
        seconds[kind, count].append(step_seconds(runners[kind], trees[count], context))
    first, *others = runners
    headings = [heading for kind in others for heading in (f"{kind} ms", f"{first} / {kind}", "first step s")]
    num_bytes = step_bytes(base, context) if bandwidth else 0
    of_bytes = ["GB", *(f"{kind} / bytes" for kind in runners)] if bandwidth else []
    table = ResultTable(title, ["nodes", f"{first} ms", "ratio", "IQR", *headings, *of_bytes])
    for count in trees:
        times = seconds[first, count]
        low, _, high = quantiles(times, n=4)
        cells = [str(count), f"{1e3 * median(times):.3f}", _ratio(times, seconds[first, 0])]
        cells.append(f"{(high - low) / median(times):.0%}")
        for kind in others:
            other = seconds[kind, count]
            cells += [f"{1e3 * median(other):.3f}", _ratio(times, other), f"{first_seconds[kind, count]:.1f}"]
        if bandwidth:
            cells += [f"{num_bytes / 1e9:.2f}"]
            cells += [times_bytes(median(seconds[kind, count]), num_bytes, bandwidth) for kind in runners]
        table.rows.append(cells)
    table.notes.append(
        f"{repeats} repeats, all arms alternate; medians. A step feeds the root and the nodes, and accepts none; ratio "
        "= to the step without nodes of the same repeat; IQR = interquartile range / median; first step = with the "
        "compilation and capture of its shape."
    )
    return table


def _ratio(times: list[float], others: list[float]) -> str:
    return f"{median(time / other for time, other in zip(times, others, strict=True)):.2f}×"


def step_bytes(base: Base, context: int) -> int:
    """Bytes that a step must read: all weights but the embedding, of which it needs a few rows, and the KV cache."""
    model, config = base.model, base.config
    weights = {weight.data_ptr(): weight.nbytes for weight in model.parameters()}
    if not config.tie_word_embeddings:
        del weights[base.base_weights.embedding.data_ptr()]
    num_key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = num_key_heads * base.shape.head_dim
    return sum(weights.values()) + 2 * config.num_hidden_layers * context * width * model.dtype.itemsize


def step_seconds(runner: Runner, tree: DraftTree, context: int) -> float:
    """Return the seconds of one step, and restore the cache."""
    wait = torch.cuda.synchronize if runner.base.model.device.type == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    output = runner.forward([1], tree, RequiredOutputs())
    output.logits.argmax(-1).tolist()
    runner.commit([])
    wait()
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


if __name__ == "__main__":
    main(steps)
