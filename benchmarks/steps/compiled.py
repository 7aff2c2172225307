"""Time of an eager and of a compiled decoding step, by the number of draft tree nodes, side by side in one run."""

from __future__ import annotations

import time
from itertools import product
from statistics import median, quantiles
from typing import Literal

import torch

from benchmarks.harness import SHAPES, ResultTable, alternate, main, num_millions, random_llama, show
from benchmarks.steps.timing import NUM_WARMUP_STEPS, bushy, prefill, step_seconds
from drafters import DraftTree, RequiredOutputs
from inference.verifier.base import Base, Dtype, load_base, resolve_device
from inference.verifier.compiled import NUM_ROWS, make_runner
from inference.verifier.runner import Runner

EAGER, COMPILED = "eager", "compiled"
VOCAB_SIZE = 32_000  # of random bases


def compiled_step(
    bases: list[str] = ["checkpoints/tiny-chat", "100m"],  # noqa: B006
    dtypes: list[Dtype] = ["float32", "bfloat16"],  # noqa: B006
    device: Literal["auto", "cpu", "cuda"] = "auto",
    nodes: list[int] = [0, 4, 8, 16, 32, 64],  # noqa: B006
    contexts: list[int] = [256],  # noqa: B006
    repeats: int = 50,
    threads: int = 0,
    out: str | None = None,
) -> None:
    """Measure a step as decoding runs it: forward, choice of the tokens, copy to the host, and cache update.

    Args:
        bases: Folders of bases, or shapes of random LLaMAs (tiny, 100m, 1b, 3b, 7b).
        dtypes: Dtypes of the weights.
        device: Device to run on; auto uses the GPU if there is one.
        nodes: Numbers of nodes, without the root; more than 64 are not compiled.
        contexts: Numbers of cached tokens before the step.
        repeats: Timed steps of every arm after three warm-up steps; eager and compiled steps alternate.
        threads: Number of torch threads; 0 keeps the default.
        out: Markdown file to write the tables to.
    """
    if repeats < 2 or min(contexts) < 1 or not 0 <= min(nodes) <= max(nodes) < NUM_ROWS[-1]:
        raise ValueError(f"repeats must be at least 2, contexts at least 1, and nodes 0 to {NUM_ROWS[-1] - 1}")
    if threads:
        torch.set_num_threads(threads)
    torch_device = resolve_device(device)
    tables = []
    for name, dtype in product(bases, dtypes):
        base = (
            random_llama(name, VOCAB_SIZE, dtype, torch_device)
            if name in SHAPES
            else load_base(name, dtype, torch_device)
        )
        if max(contexts) + max(nodes) + 1 > base.context_length:
            raise ValueError(f"the context of {name} ends at {base.context_length}: pass smaller --contexts or --nodes")
        started = time.perf_counter()
        runners = {EAGER: make_runner(base), COMPILED: make_runner(base, compile=True)}
        ready_seconds = time.perf_counter() - started
        tables += [_measure(base, dtype, runners, nodes, context, repeats, ready_seconds) for context in contexts]
    show(tables, torch_device, out)


def _measure(
    base: Base, dtype: str, runners: dict[str, Runner], nodes: list[int], context: int, repeats: int, ready: float
) -> ResultTable:
    """Time both runners behind one context."""
    trees = {count: bushy(count, base.model.config.vocab_size) if count else DraftTree() for count in nodes}
    first_seconds, seconds = {}, {arm: [] for arm in product(runners, nodes)}  # type: ignore[var-annotated]
    for runner in runners.values():
        prefill(runner, context, max(nodes) + 1)
    for count, tree in trees.items():
        outputs = []
        for runner in runners.values():
            started = time.perf_counter()
            outputs.append(runner.forward([1], tree, RequiredOutputs()).logits)
            first_seconds[count] = time.perf_counter() - started  # in the end, of the compiled runner
            runner.rollback()
            for _ in range(NUM_WARMUP_STEPS):
                step_seconds(runner, tree, context)
        num_equal = (outputs[0].argmax(-1) == outputs[1].argmax(-1)).sum().item()
        if dtype == "float32" and num_equal <= count:
            raise AssertionError(f"{count + 1 - num_equal} of {count + 1} tokens differ from the eager step's")
    title = f"{base.name} ({num_millions(base)}), {dtype}, {base.model.device.type}, context {context}"
    for _, _, (kind, count) in alternate(list(seconds), 1, repeats, title):
        seconds[kind, count].append(step_seconds(runners[kind], trees[count], context))
    table = ResultTable(title, ["nodes", "eager ms", "compiled ms", "eager / compiled", "IQR", "first step s"])
    for count in nodes:
        eager, compiled = seconds[EAGER, count], seconds[COMPILED, count]
        ratios = [before / after for before, after in zip(eager, compiled, strict=True)]
        low, _, high = quantiles(ratios, n=4)
        figures = [1e3 * median(eager), 1e3 * median(compiled), median(ratios)]
        cells = [f"{figures[0]:.3f}", f"{figures[1]:.3f}", f"{figures[2]:.2f}×", f"{low:.2f} to {high:.2f}"]
        table.rows.append([str(count), *cells, f"{first_seconds[count]:.1f}"])
    table.notes.append(
        f"{repeats} repeats, all arms alternate; medians; the ratio is that of the two steps of the same repeat. first "
        f"step = with the compilation of its shape. Both runners were ready after {ready:.1f} s."
    )
    return table


if __name__ == "__main__":
    main(compiled_step)
