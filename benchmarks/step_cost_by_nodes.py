"""What a step costs by the number of nodes it feeds, against a vanilla step of the same base and context."""

from __future__ import annotations

from statistics import median, quantiles
from typing import Literal

import numpy as np
import torch

from benchmarks.harness import SHAPES, Measured, in_turn, main, num_millions, random_llama, show
from drafters import DraftTree, RequiredOutputs
from inference.engine.base import Base, Dtype, load_base, resolve_device
from inference.engine.runner import Runner
from inference.tuning.step_cost import NUM_WARMUP_STEPS, bushy, prefill, step_seconds

VANILLA = "vanilla"
ROOM = 1024  # behind the context: at least the largest step


def chain(num_nodes: int, vocab_size: int) -> DraftTree:
    """One path of random tokens."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, num_nodes).tolist()
    return DraftTree(tokens, range(-1, num_nodes - 1))


SHAPES_OF_TREES = {"chain": chain, "bushy": bushy}


def step_cost(
    base: str = "100m",
    dtypes: list[Dtype] = ["float32", "bfloat16"],  # noqa: B006
    device: Literal["auto", "cpu", "cuda"] = "auto",
    nodes: list[int] = [1, 2, 4, 8, 16, 32, 64],  # noqa: B006
    contexts: list[int] = [256, 1024],  # noqa: B006
    repeats: int = 30,
    bandwidth: float | None = None,
    compile: bool = False,
    threads: int = 0,
    out: str | None = None,
) -> None:
    """Time of one base step by nodes fed: forward, the choice of tokens, their copy to the host, and the commit.

    Args:
        base: Shape of a random LLaMA (tiny, 100m, 1b, 7b), or folder of a base.
        dtypes: Number formats.
        device: auto takes the GPU where there is one.
        nodes: Nodes fed beside the root.
        contexts: Tokens cached before the step.
        repeats: Steps of every arm, after three to warm up; arms in turn, another one first each time.
        bandwidth: Of the memory, in GB/s; shows what share of a step the reading of the weights alone would take.
        compile: Try torch.compile on the base; where that fails, the step stays eager and a note says so.
        threads: Of torch; 0 leaves them as they are.
        out: Markdown file for the tables.
    """
    if min(repeats, *nodes, *contexts) < 1 or repeats < 2:
        raise ValueError("nodes and contexts must be at least 1, repeats at least 2")
    if threads:
        torch.set_num_threads(threads)
    place = resolve_device(device)
    tables = []
    for dtype in dtypes:
        loaded = (
            random_llama(base, 1024 if base == "tiny" else 32000, dtype, place)
            if base in SHAPES
            else load_base(base, dtype, place)
        )
        if max(contexts) + max(nodes) + 1 > loaded.context_length:
            raise ValueError(
                f"the context of {base} ends at {loaded.context_length}: pass smaller --contexts or --nodes"
            )
        runner = Runner(loaded)
        note = _compile(runner, max(contexts)) if compile else "eager"
        for context in contexts:
            title = f"{loaded.name} ({num_millions(loaded)}), {dtype}, {place.type}, context {context}"
            seconds = _measure(runner, nodes, context, repeats, title)
            tables.append(_table(title, seconds, nodes, _weight_seconds(loaded, bandwidth)))
            tables[-1].notes.append(f"{note}; {repeats} repeats, arms in turn; medians. {NOTE}")
    show(tables, place, out)


NOTE = (
    "ms = a step that feeds the root and so many nodes, none accepted; ratio = to the vanilla step of the same repeat; "
    "IQR = middle half of the repeats / median; pays from = accepted nodes a step at which it is no loss; "
    "weights = share of the step that reading the weights once takes at --bandwidth."
)


def _compile(runner: Runner, context: int) -> str:
    """Compile the base behind the head; what the runner then does is said in the answer."""
    eager = runner.model
    torch._dynamo.config.recompile_limit = 64  # each number of nodes and each context is a shape of its own
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    runner.model = torch.compile(eager)
    try:
        prefill(runner, context, ROOM)
        for num_nodes in (1, 2, 3):
            step_seconds(runner, chain(num_nodes, runner.vocab_size), context)
    except Exception as error:  # torch's compiler raises what it likes
        runner.model = eager
        return f"torch.compile failed ({type(error).__name__}), so eager"
    return "torch.compile on the base's layers"


def _measure(runner: Runner, nodes: list[int], context: int, repeats: int, title: str) -> dict[str, list[float]]:
    """Seconds of each repeat, by arm."""
    trees = {
        f"{kind} {count}": make(count, runner.vocab_size) for count in nodes for kind, make in SHAPES_OF_TREES.items()
    }
    arms = {VANILLA: DraftTree(), **trees}
    prefill(runner, context, ROOM)
    _same_root(runner, arms, context)
    for tree in arms.values():
        for _ in range(NUM_WARMUP_STEPS):
            step_seconds(runner, tree, context)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _, _, name in in_turn(list(arms), 1, repeats, title):
        seconds[name].append(step_seconds(runner, arms[name], context))
    return seconds


def _same_root(runner: Runner, arms: dict[str, DraftTree], context: int) -> None:
    """The nodes do not change what the root says: the trees cost the time of right steps."""
    alone, tolerance = None, 1e-3 if runner.dtype == torch.float32 else 0.25
    for name, tree in arms.items():
        root = runner.forward([1], tree, RequiredOutputs()).logits[0].float()
        runner.commit([])
        runner.truncate(context)
        alone = root if alone is None else alone
        assert (root - alone).abs().max() <= tolerance, f"{name} changes the root's logits"


def _table(title: str, seconds: dict[str, list[float]], nodes: list[int], weight_seconds: float | None) -> Measured:
    table = Measured(title, ["arm", "ms", "ratio", "IQR", "pays from", *(["weights"] if weight_seconds else [])])
    for name, taken in seconds.items():
        ratio = median(step / vanilla for step, vanilla in zip(taken, seconds[VANILLA], strict=True))
        low, _, high = quantiles(taken, n=4)
        cells = [name, f"{1e3 * median(taken):.3f}", f"{ratio:.2f}×", f"{(high - low) / median(taken):.0%}"]
        cells.append(f"{ratio - 1:+.2f}" if name != VANILLA else "")
        table.rows.append(cells + ([f"{weight_seconds / median(taken):.0%}"] if weight_seconds else []))
    return table


def _weight_seconds(base: Base, bandwidth: float | None) -> float | None:
    """Time to read once what a step reads of the weights: all but an embedding that is not the head too."""
    if bandwidth is None:
        return None
    embedding, head = base.base_weights.embedding, base.base_weights.head
    num_bytes = sum(weight.nbytes for weight in base.model.parameters())
    return (num_bytes - (0 if embedding is head else embedding.nbytes)) / (1e9 * bandwidth)


if __name__ == "__main__":
    main(step_cost)
