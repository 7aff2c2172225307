"""Shared by the benchmarks: alternating runs, statistics, random bases, and tables that record how they were made."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import product
from typing import Any, TypeVar

import torch

from data.files import write_text
from inference.runs import progress_bars
from inference.timing import processor_name
from inference.verifier.base import Base
from train.arguments import parse_arguments
from train.cli import user_errors

ArmName = TypeVar("ArmName", bound=Hashable)

SIZES = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
SHAPES = {  # the `SIZES` of LLaMAs
    "draft": (256, 688, 2, 4, 4),
    "tiny": (192, 512, 8, 6, 6),
    "100m": (768, 2048, 12, 12, 12),
    "1b": (2048, 8192, 16, 32, 8),
    "3b": (3072, 8192, 28, 24, 8),
    "7b": (4096, 11008, 32, 32, 32),
    "8b": (4096, 14336, 32, 32, 8),
    "8b/16": (256, 896, 32, 8, 2),  # with a sixteenth of the width
    "qwen3-8b": (4096, 12288, 36, 32, 8),
    "grouped": (512, 1408, 8, 16, 8),  # a small one with grouped heads into which tiny-chat fits
}
VOCAB_SIZES = {"8b": 128256, "8b/16": 128256, "qwen3-8b": 151936}  # of the others 32,000


@dataclass
class ResultTable:
    """A table of results, with the settings and what a reader should know about the numbers as notes."""

    title: str  # what was measured
    headings: Sequence[str]  # of the columns; the first column names the arm
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        """Return the title, the table and the notes as Markdown."""
        lines = [self.headings, ["---", *["---:"] * (len(self.headings) - 1)], *self.rows]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        return "\n\n".join([f"## {self.title}", table, "\n".join(f"- {note}" for note in self.notes)])


def alternate(arms: Sequence[ArmName], num_items: int, repeats: int, title: str) -> Iterator[tuple[int, int, ArmName]]:
    """Yield (repeat, item, arm) in the order of the runs, and show a progress bar on a terminal.

    On each item, all arms run one after the other, starting with another arm each time. So a machine that slows down
    affects all arms alike.
    """
    with progress_bars(transient=True) as progress:
        task = progress.add_task(title, total=len(arms) * num_items * repeats)
        for repeat, item in product(range(repeats), range(num_items)):
            first = (repeat + item) % len(arms)
            for arm in [*arms[first:], *arms[:first]]:
                yield repeat, item, arm
                progress.advance(task)


def random_llama(shape: str, vocab: int, dtype: str, device: torch.device, context: int = 4096) -> Base:
    """Create a LLaMA of one of the `SHAPES` with random weights, without a tokenizer and without an EOS token."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights

    if shape not in SHAPES:
        raise ValueError(f"unknown shape {shape!r}: known are {', '.join(SHAPES)}")
    sizes: dict[str, Any] = dict(zip(SIZES, SHAPES[shape], strict=True))
    tokens: dict[str, Any] = {"vocab_size": vocab, "bos_token_id": None, "eos_token_id": None}
    config = LlamaConfig(**sizes, **tokens, max_position_embeddings=context)
    with torch.device(device), no_init_weights():
        model = LlamaForCausalLM._from_config(config, dtype=getattr(torch, dtype))
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.02, generator=generator) if weight.dim() > 1 else weight.fill_(1)
    # Benchmarks feed token ids to a random base; everywhere else, a base has a tokenizer.
    return Base(f"random {shape} LLaMA", model.eval().requires_grad_(False), None)  # type: ignore[arg-type]


def num_millions(base: Base) -> str:
    """Return the number of parameters in millions, as text."""
    return f"{sum(weight.numel() for weight in base.model.parameters()) / 1e6:.1f} M"


def times_bytes(seconds: float, num_bytes: float, bandwidth: float) -> str:
    """How many times as long something takes as reading its bytes, at a bandwidth in bytes a second, as text."""
    return f"{seconds * bandwidth / num_bytes:.2f}×"


def origin(device: torch.device) -> dict[str, str]:
    """Return the command, machine, date and versions with which a table was made."""
    import transformers

    machine = f"{processor_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads used"
    if device.type == "cuda":
        machine = f"{torch.cuda.get_device_name(device)}; {machine}"
    return {
        "command": shlex.join(["python", *sys.orig_argv[1:]]),  # a training in between changes sys.argv
        "machine": f"{machine}; load {os.getloadavg()[0]:.1f} at the end",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
    }


def markdown(tables: Sequence[ResultTable], about: Mapping[str, str]) -> str:
    """Return the tables below their origin."""
    head = "\n".join(f"- {name}: `{value}`" for name, value in about.items())
    return "\n\n".join([head, *(table.markdown() for table in tables)]) + "\n"


def show(tables: Sequence[ResultTable], device: torch.device, out: str | None) -> None:
    """Print the tables with their origin, and write the same to ``out`` if it is given."""
    text = markdown(tables, origin(device))
    print(text)
    if out:
        write_text(out, text)


def main(function: Callable[..., None], argv: list[str] | None = None) -> None:
    """Run a benchmark with the arguments of the command line, which are read as those of ``drafters`` are."""
    name = function.__name__
    with user_errors(name):
        function(**parse_arguments(name, function, sys.argv[1:] if argv is None else argv))
