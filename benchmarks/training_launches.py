"""What a training step of the recipes for large bases launches, on tensors without data; and its time, by estimate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.harness import SHAPES, VOCAB_SIZES, ResultTable, main
from benchmarks.launches import Launches
from benchmarks.training_speed import drafter_recipe
from drafters import recipe
from drafters.losses import chunks
from drafters.protocol import BaseShape, BaseWeights
from train.cli import find_config
from train.memory import step_bytes

RECIPES = {  # and the shapes of their bases
    "ctc.yaml": "7b",
    "ctc_deep.yaml": "7b",
    "vicuna_7b.yaml": "7b",
    "llama3_8b.yaml": "8b",
    "qwen3_8b.yaml": "qwen3-8b",
}
LAUNCH_SECONDS = {"a good host": 10e-6, "the measured host": 26e-6}
# An H100 as it is used: products in bfloat16 and in float32, and its memory.
FLOPS, FLOAT32_FLOPS, BANDWIDTH = 400e12, 40e12, 2.7e12
BASE_CALLS = 1302 / 32  # of a layer of the base, as benchmarks.launches counts them
OPTIMIZER_BYTES = 32  # that AdamW and clipping read and write for each weight
READS_ROWS = "embedding", "gather", "index", "index_select"


class Work(Launches):
    """Also counts the chunks of a loss, and adds up how long a GPU works on the operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0  # for each operator, that of its products or of its bytes, whichever is longer
        self.num_chunks = self.calls_of_chunk = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, kwargs = self.operators, kwargs or {}
        if function.namespace == "prim":  # questions about tensors without data
            return function(*args, **kwargs)
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if self.operators > before:
            tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, Tensor)]
            is_wide = any(each.dtype in (torch.float32, torch.float64) for each in tensors)
            if function.__name__.partition(".")[0] in READS_ROWS:
                tensors = tensors[-1:] * 2
            count: Any = flop_registry.get(function.overloadpacket)
            products = count(*args, **kwargs, out_val=result) / (FLOAT32_FLOPS if is_wide else FLOPS) if count else 0.0
            self.seconds += max(products, sum(each.nbytes for each in tensors) / BANDWIDTH)
        return result

    @contextmanager
    def all_chunks(self) -> Iterator[None]:
        """Let a dry run compute all chunks of a loss, and count them."""
        split, one_chunk = chunks.chunks, chunks._one_chunk

        def every(*sizes: int) -> list[slice]:
            with patch.object(chunks, "dry_run_device", lambda: None):
                return split(*sizes)

        def counted(*args: Any) -> Any:
            before = self.operators
            result = one_chunk(*args)
            self.num_chunks += 1
            self.calls_of_chunk = max(self.calls_of_chunk, self.operators - before)
            return result

        with patch.multiple(chunks, chunks=every, _one_chunk=counted):
            yield


def training_launches(configs: list[str] = [*RECIPES]) -> None:  # noqa: B006
    """Print the table of docs/results/training.md: chunks, operators and time of a training step, by estimate.

    Args:
        configs: Recipes among those for large bases.
    """
    print(table(configs).markdown())


def table(configs: list[str]) -> ResultTable:
    """The operators of a step on the largest batch of each recipe, with its forward of the base and its optimizer."""
    headings = ["recipe", "anchors", "chunks", "calls of a chunk", "calls of a step", "s of a GPU"]
    headings += [f"s of {host}" for host in LAUNCH_SECONDS]
    result = ResultTable("Launches of a training step", headings)
    for config in configs:
        if config not in RECIPES:
            raise ValueError(f"no recipe for a large base: {config!r}; there are {', '.join(RECIPES)}")
        settings = yaml.safe_load(Path(find_config(config)).read_text())["data"]
        batch_size, length = settings["batch_size"], settings["max_length"]
        length = min(length, settings.get("max_tokens", math.inf) // batch_size)
        num_anchors, work = count(config, (batch_size, length))
        hosts = [f"{work.operators * seconds:.2f}" for seconds in LAUNCH_SECONDS.values()]
        counts = num_anchors, work.num_chunks, work.calls_of_chunk, work.operators
        result.rows.append([f"`{config}`", *map(str, counts), f"{work.seconds:.2f}", *hosts])
    result.notes.append(
        "The batch of 8,192 tokens with most anchors. Calls: operators that compute or copy, with the base's. Seconds, "
        "all estimated: of a GPU, what an H100 computes and reads if nothing waits for a launch; of a host, its "
        "launches at 10 and 26 us each. A step takes the longer of both."
    )
    return result


def count(config: str, size: tuple[int, int]) -> tuple[int, Work]:
    """The number of anchors and the work of a step on B texts of S tokens, all of them the assistant's."""
    hidden_size, intermediate_size, num_layers, num_heads, num_key_heads = SHAPES[RECIPES[config]]
    vocab_size = VOCAB_SIZES.get(RECIPES[config], 32000)
    head_dim = hidden_size // num_heads
    kind, arguments = drafter_recipe(config, num_layers)
    with torch.device("meta"):
        shape = BaseShape(hidden_size, vocab_size, num_layers, num_heads, head_dim, intermediate_size)
        drafter: Any = recipe.build(kind, shape, arguments)
        weight = torch.empty(vocab_size, hidden_size, dtype=torch.bfloat16)
    if drafter.draft_tokens is not None:  # whose values are read
        drafter.draft_tokens = torch.arange(len(drafter.draft_tokens))
    with Work() as work, work.all_chunks():
        step_bytes(drafter, BaseWeights(weight, weight), size, torch.bfloat16, "cuda")
    layer = hidden_size * (2 * hidden_size + 2 * num_key_heads * head_dim + 3 * intermediate_size)
    of_base = 2 * math.prod(size) * (num_layers * layer + vocab_size * hidden_size) / FLOPS
    of_optimizer = OPTIMIZER_BYTES * sum(weight.numel() for weight in drafter.parameters()) / BANDWIDTH
    work.seconds += of_base + of_optimizer
    work.operators += round(num_layers * BASE_CALLS)
    return size[0] * min(drafter.loss_options.num_anchors, size[1]), work


if __name__ == "__main__":
    main(training_launches)
