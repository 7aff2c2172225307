"""Time of a decoding step by the number of draft tree nodes, relative to a step without a draft tree."""

from __future__ import annotations

from statistics import median, quantiles
from typing import Literal

import numpy as np
import torch

from benchmarks.harness import SHAPES, ResultTable, alternate, main, num_millions, random_llama, show
from benchmarks.steps.timing import NUM_WARMUP_STEPS, bushy, prefill, step_seconds
from drafters import DraftTree, RequiredOutputs
from inference.verifier.base import Base, Dtype, load_base, resolve_device
from inference.verifier.runner import Runner

VANILLA = "vanilla"
RESERVE = 1024  # tokens reserved after the context, at least the size of the largest step


def chain(num_nodes: int, vocab_size: int) -> DraftTree:
    """Return a tree with a single path of random tokens."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, num_nodes).tolist()
    return DraftTree(tokens, range(-1, num_nodes - 1))


TREES = {"chain": chain, "bushy": bushy}


def step_cost(
    base: str = "100m",
    dtypes: list[Dtype] = ["float32", "bfloat16"],  # noqa: B006
    device: Literal["auto", "cpu", "cuda"] = "auto",
    nodes: list[int] = [1, 2, 4, 8, 16, 32, 64],  # noqa: B006
    contexts: list[int] = [256, 1024],  # noqa: B006
    repeats: int = 30,
    bandwidth: float | None = None,
    threads: int = 0,
    out: str | None = None,
) -> None:
    """Measure a step by the number of nodes: forward, choice of the tokens, copy to the host, and cache update.

    Args:
        base: Shape of a random LLaMA (tiny, 100m, 1b, 7b), or folder of a base.
        dtypes: Dtypes of the weights.
        device: Device to run on; auto uses the GPU if there is one.
        nodes: Numbers of nodes, without the root.
        contexts: Numbers of cached tokens before the step.
        repeats: Timed steps of every arm after three warm-up steps; the arms alternate.
        bandwidth: Memory bandwidth in GB/s; adds the share of a step that reading the weights once would take.
        threads: Number of torch threads; 0 keeps the default.
        out: Markdown file to write the tables to.
    """
    if min(repeats, *nodes, *contexts) < 1 or repeats < 2:
        raise ValueError("nodes and contexts must be at least 1, repeats at least 2")
    if threads:
        torch.set_num_threads(threads)
    torch_device = resolve_device(device)
    tables = []
    for dtype in dtypes:
        loaded = (
            random_llama(base, 1024 if base == "tiny" else 32000, dtype, torch_device)
            if base in SHAPES
            else load_base(base, dtype, torch_device)
        )
        if max(contexts) + max(nodes) + 1 > loaded.context_length:
            raise ValueError(
                f"the context of {base} ends at {loaded.context_length}: pass smaller --contexts or --nodes"
            )
        runner = Runner(loaded)
        for context in contexts:
            title = f"{loaded.name} ({num_millions(loaded)}), {dtype}, {torch_device.type}, context {context}"
            seconds = _measure(runner, nodes, context, repeats, title)
            tables.append(_table(title, seconds, nodes, _weight_seconds(loaded, bandwidth)))
            tables[-1].notes.append(f"{repeats} repeats, arms alternate; medians. {NOTE}")
    show(tables, torch_device, out)


NOTE = (
    "ms = a step that feeds the root and the given number of nodes, none accepted; ratio = to the vanilla step of the "
    "same repeat; IQR = interquartile range / median; pays from = accepted nodes per step at which the tree breaks "
    "even; weights = share of the step that reading the weights once takes at --bandwidth."
)


def _measure(runner: Runner, nodes: list[int], context: int, repeats: int, title: str) -> dict[str, list[float]]:
    """Return the seconds of each repeat, by arm."""
    trees = {f"{kind} {count}": make(count, runner.vocab_size) for count in nodes for kind, make in TREES.items()}
    arms = {VANILLA: DraftTree(), **trees}
    prefill(runner, context, RESERVE)
    _same_root(runner, arms, context)
    for tree in arms.values():
        for _ in range(NUM_WARMUP_STEPS):
            step_seconds(runner, tree, context)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _, _, name in alternate(list(arms), 1, repeats, title):
        seconds[name].append(step_seconds(runner, arms[name], context))
    return seconds


def _same_root(runner: Runner, arms: dict[str, DraftTree], context: int) -> None:
    """Check that the nodes do not change the root's logits, so that the measured steps are correct ones."""
    expected, tolerance = None, 1e-3 if runner.dtype == torch.float32 else 0.25
    for name, tree in arms.items():
        root = runner.forward([1], tree, RequiredOutputs()).logits[0].float()
        runner.commit([])
        runner.truncate(context)
        expected = root if expected is None else expected
        assert (root - expected).abs().max() <= tolerance, f"{name} changes the root's logits"


def _table(title: str, seconds: dict[str, list[float]], nodes: list[int], weight_seconds: float | None) -> ResultTable:
    table = ResultTable(title, ["arm", "ms", "ratio", "IQR", "pays from", *(["weights"] if weight_seconds else [])])
    for name, times in seconds.items():
        ratio = median(step / vanilla for step, vanilla in zip(times, seconds[VANILLA], strict=True))
        low, _, high = quantiles(times, n=4)
        cells = [name, f"{1e3 * median(times):.3f}", f"{ratio:.2f}×", f"{(high - low) / median(times):.0%}"]
        cells.append(f"{ratio - 1:+.2f}" if name != VANILLA else "")
        table.rows.append(cells + ([f"{weight_seconds / median(times):.0%}"] if weight_seconds else []))
    return table


def _weight_seconds(base: Base, bandwidth: float | None) -> float | None:
    """Return the time to read once the weights that a step reads: all but an embedding that is not also the head."""
    if bandwidth is None:
        return None
    embedding, head = base.base_weights.embedding, base.base_weights.head
    num_bytes = sum(weight.nbytes for weight in base.model.parameters())
    return (num_bytes - (0 if embedding is head else embedding.nbytes)) / (1e9 * bandwidth)


if __name__ == "__main__":
    main(step_cost)
