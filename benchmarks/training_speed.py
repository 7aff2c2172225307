"""Time and memory of every drafter's training step by phase, on a random base of a chosen shape."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal

import torch
import yaml

import drafters
from benchmarks.harness import SHAPES, VOCAB_SIZES, ResultTable, main, num_millions, random_llama, show
from benchmarks.recipes import grouped
from data.dtypes import Dtype
from drafters import recipe
from drafters.protocol import LearnedDrafter, TrainingBatch
from inference.verifier.base import Base, resolve_device
from train.cli import find_config
from train.features import compute_features
from train.memory import LiveBytes, step_bytes

CONFIGS = ["medusa.yaml", "hydra.yaml", "eagle.yaml", "eagle3.yaml", "block.yaml", "ctc.yaml", "ctc_deep.yaml"]
PHASES = ("base", "drafter", "optimizer")
NOTE = (
    "M = millions of trained weights; A = anchors of a text; base = forward with its labels, drafter = its loss "
    "forward and backward, as shares of a step; of base = step relative to the base's share; spread = (slowest - "
    "fastest) / median; MB = most that the drafter's loss and its backward pass allocate besides weights and "
    "gradients: counted in a step (by torch on a GPU), and as lightning fit estimates it"
)


class TrainingStep:
    """A training step of a drafter on B random texts of S tokens with a full loss mask, timed by phase."""

    def __init__(
        self, kind: type[LearnedDrafter], arguments: dict, base: Base, size: tuple[int, int], precision: str
    ) -> None:
        torch.manual_seed(0)
        self.base, self.autocast = base, torch.bfloat16 if precision == "bf16" else None
        device, shape = base.model.device, base.shape
        self.drafter = recipe.build(kind, shape, arguments).to(device)
        self.optimizer = torch.optim.AdamW(self.drafter.parameters())
        self.ids = torch.randint(shape.vocab_size, size, device=device)
        self.mask = torch.ones_like(self.ids, dtype=torch.bool)

    def step(self) -> dict[str, float]:
        """Make a step, and return the seconds of its phases."""
        times = [self._clock()]
        batch = self._batch()
        times.append(self._clock())
        self._train(batch)
        times.append(self._clock())
        self.optimizer.step()
        self.optimizer.zero_grad()
        times.append(self._clock())
        seconds = (end - start for start, end in pairwise(times))
        return dict(zip(PHASES, seconds, strict=True))

    def peak(self) -> int:
        """Bytes at the worst moment of a step, the first one on a CPU: all weights and what the step allocates."""
        if self.ids.is_cuda:
            self.step()  # compiles
            torch.cuda.reset_peak_memory_stats(self.ids.device)
            self.step()
            return torch.cuda.max_memory_allocated(self.ids.device)
        weights = [*self.base.model.parameters(), *self.drafter.state_dict().values()]
        with LiveBytes(*weights) as live:
            self.step()
        return live.peak + sum(weight.nbytes for weight in weights)

    def memory(self) -> tuple[int, int]:
        """Bytes that a loss and its backward pass need besides weights, gradients and batch, and their estimate."""
        batch, ids = self._batch(), self.ids
        existing = [*self.drafter.state_dict().values(), *self.base.model.parameters(), ids, self.mask]
        existing += [batch.hidden, batch.required_last_hidden(), batch.labels]
        for weight in self.drafter.parameters():
            weight.grad = torch.zeros_like(weight)
            existing.append(weight.grad)
        if ids.is_cuda:
            torch.cuda.reset_peak_memory_stats(ids.device)
            peak = -torch.cuda.memory_allocated(ids.device)
            self._train(batch)
            peak += torch.cuda.max_memory_allocated(ids.device)
        else:
            with LiveBytes(*existing) as live:
                self._train(batch)
            peak = live.peak
        self.drafter.zero_grad()
        size = len(ids), ids.shape[1]
        return peak, step_bytes(self.drafter, self.base.base_weights, size, self.autocast, ids.device.type)

    def _batch(self) -> TrainingBatch:
        return compute_features(self.base, self.drafter.required_outputs.hidden_layers, self.ids, self.mask)

    def _train(self, batch: TrainingBatch) -> None:
        with torch.autocast(self.ids.device.type, self.autocast, enabled=self.autocast is not None):
            loss, _ = self.drafter.loss(batch, self.base.base_weights)
        loss.backward()

    def _clock(self) -> float:
        if self.ids.is_cuda:
            torch.cuda.synchronize(self.ids.device)
        return perf_counter()


def training_speed(
    configs: list[str] = CONFIGS,
    shape: str = "1b",
    vocab_size: int | None = None,
    dtype: Dtype = "float32",
    precision: Literal["32", "bf16"] = "32",
    batch_size: int = 1,
    length: int = 128,
    anchors: list[int] = [32],  # noqa: B006
    device: Literal["auto", "cpu", "cuda"] = "auto",
    repeats: int = 3,
    out: str | None = None,
) -> None:
    """Measure the phases and the memory of every drafter's training step.

    Args:
        configs: Training configurations, whose drafters are measured.
        shape: Shape of the base: 100m, 1b (LLaMA 3.2), 3b (LLaMA 3.2), 7b (Vicuna), 8b (LLaMA 3), qwen3-8b, or 8b/16,
            which has a sixteenth of the width.
        vocab_size: Vocabulary size V. By default that of an 8b shape (128,256, qwen3-8b 151,936), otherwise 32,000.
        dtype: Dtype of the base.
        precision: Precision of the drafter's computations; its weights are float32.
        batch_size: Batch size B.
        length: Length S of the texts.
        anchors: Numbers of anchors A of each text, for the drafters that sample anchors; 0 for that of the
            configuration.
        device: Device to run on; auto uses the GPU if there is one.
        repeats: Timed steps of every drafter after a warm-up step.
        out: Markdown file to write the table to.
    """
    torch_device, vocab_size = resolve_device(device), vocab_size or VOCAB_SIZES.get(shape, 32000)
    base = random_llama(shape, vocab_size, dtype, torch_device, context=length)
    title = f"{shape} ({num_millions(base)}), V = {vocab_size}, {dtype}, B = {batch_size}, S = {length}"
    headings = ["drafter", "M", "A", "tokens/s", "s/step", *PHASES, "of base", "spread", "MB", "estimated MB"]
    table = ResultTable(f"Training steps: {title}", headings, notes=[f"{repeats} repeats. {NOTE}"])
    arms = [(config, count) for config in configs for count in (anchors if samples_anchors(config) else [0])]
    for config, num_anchors in arms:
        print(f"measuring {config} with {num_anchors} anchors", flush=True)
        kind, arguments = drafter_recipe(config, base.shape.num_layers, num_anchors)
        step = TrainingStep(kind, arguments, base, (batch_size, length), precision)
        step.step()  # warms up
        table.rows.append([config.removesuffix(".yaml"), *cells(step, repeats)])
        del step  # before the next one is built
    show([table], torch_device, out)


def samples_anchors(config: str) -> bool:
    """Whether the drafter of a configuration is trained on anchors, rather than on every position."""
    kind, arguments = drafter_recipe(config, 1)
    options = recipe.training_defaults(kind) | recipe.flattened(arguments)
    return bool(options.get("loss.num_anchors", options.get("num_anchors", 0)))


def drafter_recipe(config: str, num_layers: int, num_anchors: int = 0) -> tuple[type[LearnedDrafter], dict[str, Any]]:
    """The drafter of a training configuration for a 7B base: its class and arguments.

    The base layers that it reads are moved to the same relative depth of a base with another number of layers, and it
    gets another number of anchors, unless that is 0.
    """
    node = yaml.safe_load(Path(find_config(config)).read_text())["model"]["drafter"]
    kind = getattr(drafters, node["class_path"].rpartition(".")[2])
    arguments = node["init_args"]
    for options in (arguments, arguments.get("trunk", {})):
        if layers := options.get("hidden_layers"):
            moved = [layer if layer < 0 else round(layer * num_layers / SHAPES["7b"][2]) for layer in layers]
            options["hidden_layers"] = sorted(set(moved), key=moved.index)
    return kind, grouped(kind, {"num_anchors": num_anchors} if num_anchors else {}, arguments)


def cells(step: TrainingStep, repeats: int) -> list[str]:
    """Time a step, count its memory, and return the cells of its row."""
    phases = [step.step() for _ in range(repeats)]
    steps = [sum(each.values()) for each in phases]
    middle = median(steps)
    options = getattr(step.drafter, "loss_options", step.drafter)
    shares = [median(each[name] / total for each, total in zip(phases, steps, strict=True)) for name in phases[0]]
    return [
        f"{sum(weight.numel() for weight in step.drafter.parameters()) / 1e6:.1f}",
        str(getattr(options, "num_anchors", "")),
        f"{step.ids.numel() / middle:.1f}",
        f"{middle:.2f}",
        *(f"{share:.0%}" for share in shares),
        f"{1 / shares[0]:.2f}",
        f"{(max(steps) - min(steps)) / middle:.0%}",
        *(f"{each / 1e6:.0f}" for each in step.memory()),
    ]


if __name__ == "__main__":
    main(training_speed)
