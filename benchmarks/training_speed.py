"""Training speed: of several arms on the same batches, and of every drafter's step by phase at a chosen shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import drafters
from benchmarks.experiment import Arm, SharedSettings
from benchmarks.harness import (
    ResultTable,
    alternate,
    drafter_recipe,
    llama_config,
    main,
    num_millions,
    random_llama,
    show,
    spread,
)
from data.module import ShareGPTData
from drafters import recipe
from drafters.protocol import BaseShape, BaseWeights, LearnedDrafter, TrainingBatch
from inference.runs import progress_bars
from inference.verifier.base import Base, Dtype, resolve_device, shape_of
from train.features import compute_features
from train.memory import step_bytes
from train.module import DrafterTraining

if TYPE_CHECKING:
    from transformers import LlamaConfig

CONFIGS = ["medusa.yaml", "hydra.yaml", "eagle.yaml", "eagle3.yaml", "block.yaml", "ctc.yaml", "ctc_deep.yaml"]
SMALL_VOCAB = 64
SHORT, FEW_ANCHORS = 64, 16  # tokens and anchors of the texts on which the operations of a loss are counted
BASE, NETWORK, LOSS, OPTIMIZER = "base", "drafter", "loss", "optimizer"


class BatchSize(NamedTuple):
    """B and S of a training batch."""

    num_rows: int
    num_positions: int


def training_speeds(arms: Sequence[Arm], common: SharedSettings, num_batches: int = 8) -> dict[str, float]:
    """Return the tokens of text per second that each arm trains on, including the base's forward.

    The speeds are medians over the batches.

    Args:
        arms: The arms to train; their weights are discarded.
        common: Base, text and batches; the feature store is not read.
        num_batches: Number of timed batches, after one for warming up.
    """
    data = ShareGPTData(
        common.base, common.files, val_size=0, max_length=common.max_length, batch_size=common.batch_size
    )
    data.setup("fit")
    batches = list(islice(data.train_dataloader(), num_batches + 1))
    modules = {}
    for arm in arms:
        torch.manual_seed(0)
        build = partial(recipe.build, getattr(drafters, arm.drafter), init_args=arm.arguments)
        modules[arm.name] = DrafterTraining(common.base, build)
    optimizers = {name: torch.optim.AdamW(module.drafter.parameters()) for name, module in modules.items()}
    speeds: dict[str, list[float]] = {name: [] for name in modules}
    for _, index, name in alternate(list(modules), len(batches), 1, "training steps"):
        module, batch = modules[name], batches[index]
        started = perf_counter()
        training_batch = module.compute_batch(batch["input_ids"], batch["loss_mask"])
        loss, _ = module.drafter.loss(training_batch, module.base.base_weights)
        loss.backward()
        optimizers[name].step()
        optimizers[name].zero_grad()
        speeds[name].append(int(batch["lengths"].sum()) / (perf_counter() - started))
    return {name: median(each[1:] or each) for name, each in speeds.items()}


class TrainingStep:
    """A training step on random texts with a full loss mask, timed by phase.

    The time of the loss is what the vocabulary costs: the time of the same drafter for a base of 64 tokens, with its
    backward pass, is that of the drafter's network, and the rest is the loss.

    Args:
        kind: Class of the drafter.
        arguments: Its arguments.
        base: The base.
        size: Size of the batch.
        precision: bf16 computes the drafter under autocast; its weights are float32.
    """

    def __init__(
        self, kind: type[LearnedDrafter], arguments: dict, base: Base, size: BatchSize, precision: str
    ) -> None:
        torch.manual_seed(0)
        self.base, self.is_autocast = base, precision == "bf16"
        device, shape, weights = base.model.device, base.shape, base.base_weights
        self.drafter = recipe.build(kind, shape, arguments).to(device)
        self.network = recipe.build(kind, replace(shape, vocab_size=SMALL_VOCAB), arguments).to(device)
        self.small_weights = BaseWeights(weights.embedding[:SMALL_VOCAB], weights.head[:SMALL_VOCAB])
        self.optimizer = torch.optim.AdamW(self.drafter.parameters())
        self.ids = torch.randint(shape.vocab_size, size, device=device)
        self.mask = torch.ones_like(self.ids, dtype=torch.bool)

    def seconds(self) -> dict[str, float]:
        """Make a step and return the seconds of its phases."""
        times = [self._clock()]
        hidden, last, labels = compute_features(self.base, self.drafter.required_outputs.hidden_layers, self.ids)
        times.append(self._clock())
        batch = TrainingBatch(hidden, last, self.ids, labels, self.mask)
        small = replace(batch, input_ids=self.ids % SMALL_VOCAB, labels=labels % SMALL_VOCAB)
        self._train(self.network, small, self.small_weights)
        self.network.zero_grad()
        times.append(self._clock())
        self._train(self.drafter, batch, self.base.base_weights)
        times.append(self._clock())
        self.optimizer.step()
        self.optimizer.zero_grad()
        times.append(self._clock())
        base, network, both, optimizer = (end - start for start, end in pairwise(times))
        return {BASE: base, NETWORK: network, LOSS: both - network, OPTIMIZER: optimizer}

    def _train(self, drafter: LearnedDrafter, batch: TrainingBatch, weights: BaseWeights) -> None:
        with torch.autocast(self.ids.device.type, torch.bfloat16, enabled=self.is_autocast):
            loss, _ = drafter.loss(batch, weights)
        loss.backward()

    def _clock(self) -> float:
        if self.ids.is_cuda:
            torch.cuda.synchronize(self.ids.device)
        return perf_counter()


@dataclass(frozen=True)
class Devices:
    """Devices that a table is computed for.

    Args:
        num_devices: Number of devices.
        flops: Operations per second of a device, dense bfloat16.
        utilisation: Share of them that matrix products reach.
        memory_bandwidth: Bytes per second of a device's memory.
        link_bandwidth: Bytes per second that a device sends to the others.
    """

    num_devices: int = 8
    flops: float = 989e12
    utilisation: float = 0.4
    memory_bandwidth: float = 3.35e12
    link_bandwidth: float = 450e9


def training_speed(
    configs: list[str] = CONFIGS,
    shape: str = "1b",
    vocab_size: int = 32000,
    dtype: Dtype = "float32",
    precision: Literal["32", "bf16"] = "32",
    batch_size: int = 1,
    length: int = 128,
    anchors: list[int] = [32],  # noqa: B006
    device: Literal["auto", "cpu", "cuda"] = "auto",
    repeats: int = 3,
    threads: int = 0,
    computed_shape: str = "7b",
    computed_for: Devices = Devices(),
    out: str | None = None,
) -> None:
    """Measure the phases of every drafter's training step, and compute what a day on several GPUs would do.

    Args:
        configs: Training configurations, whose drafters are measured.
        shape: Shape of the base: 100m, 1b (LLaMA 3.2), 3b (LLaMA 3.2), 7b (Vicuna), or 7b/16, which has a sixteenth of
            its width.
        vocab_size: Vocabulary size V.
        dtype: Dtype of the base.
        precision: Precision of the drafter's computations; its weights are float32.
        batch_size: Batch size B.
        length: Length S of the texts.
        anchors: Numbers of anchors A of each text, for the drafters that sample anchors; 0 for that of the
            configuration.
        device: Device to run on; auto uses the GPU if there is one.
        repeats: Timed steps of every drafter after a warm-up step.
        threads: Number of torch threads; 0 keeps the default.
        computed_shape: Shape of the base of the computed table, whose batches are those of the configurations.
        computed_for: Devices of the computed table; the default is eight H100 SXM.
        out: Markdown file to write the tables to.
    """
    torch_device = resolve_device(device)
    if threads:
        torch.set_num_threads(threads)
    base = random_llama(shape, vocab_size, dtype, torch_device, context=length)
    title = f"{shape} ({num_millions(base)}), V = {vocab_size}, {dtype}, B = {batch_size}, S = {length}"
    headings = ["drafter", "M", "A", "tokens/s", "s/step", BASE, NETWORK, LOSS, OPTIMIZER, "of base", "spread"]
    table = ResultTable(f"Training steps: {title}", headings, notes=[f"{repeats} repeats. {NOTE}"])
    arms = [(config, count) for config in configs for count in (anchors if config_anchors(config) else [0])]
    with progress_bars(transient=True) as progress:
        task = progress.add_task("training steps", total=len(arms))
        for config, num_anchors in arms:
            kind, arguments = with_anchors(config, base.shape.num_layers, num_anchors)
            step = TrainingStep(kind, arguments, base, BatchSize(batch_size, length), precision)
            step.seconds()  # warms up
            table.rows.append([config.removesuffix(".yaml"), *cells(step, repeats)])
            progress.advance(task)
            del step  # before the next one is built
    show([table, computed_table(configs, computed_shape, computed_for)], torch_device, out)


NOTE = (
    "M = millions of trained weights; A = anchors of a text; shares of a step: base = forward with its labels, drafter "
    "= forward and backward pass of its network, loss = all that depends on the vocabulary, optimizer = AdamW; of base "
    "= a step relative to the base's share; spread = (slowest - fastest) / median of the steps"
)


def config_anchors(config: str) -> int:
    """Number of anchors of a configuration's drafter, or 0 if it samples none."""
    kind, arguments = drafter_recipe(config, 1)
    options = recipe.training_defaults(kind) | recipe.flattened(arguments)
    return options.get("loss.num_anchors", options.get("num_anchors", 0))


def with_anchors(config: str, num_layers: int, num_anchors: int) -> tuple[type[LearnedDrafter], dict[str, Any]]:
    """The drafter of a configuration with another number of anchors, unless that is 0."""
    kind, arguments = drafter_recipe(config, num_layers)
    return kind, recipe.nested(arguments | ({"num_anchors": num_anchors} if num_anchors else {}), recipe.groups(kind))


def cells(step: TrainingStep, repeats: int) -> list[str]:
    """Time a step, and return the cells of its row."""
    phases = [step.seconds() for _ in range(repeats)]
    steps = [sum(each.values()) for each in phases]
    middle = median(steps)
    shares = [median(each[name] / total for each, total in zip(phases, steps, strict=True)) for name in phases[0]]
    return [
        f"{num_weights(step.drafter) / 1e6:.1f}",
        str(getattr(step.drafter, "num_anchors", "")),
        f"{step.ids.numel() / middle:.1f}",
        f"{middle:.2f}",
        *(f"{share:.0%}" for share in shares),
        f"{1 / shares[0]:.2f}",
        f"{spread(steps):.0%}",
    ]


def num_weights(drafter: LearnedDrafter) -> int:
    return sum(weight.numel() for weight in drafter.parameters())


def computed_table(configs: Sequence[str], shape: str, devices: Devices) -> ResultTable:
    """What a day of training would do, from the shapes alone."""
    size, config = BatchSize(4, 2048), llama_config(shape, 32000, 2048)  # as in the configurations
    base = shape_of(config)
    num_tokens = size.num_rows * size.num_positions
    headings = ["drafter", "M", "base TFLOP", "TFLOP", "s/step", BASE, NETWORK, OPTIMIZER, "exchange", "G tokens"]
    table = ResultTable(f"Computed, not measured: a day of {devices.num_devices} GPUs on a {shape} base", headings)
    for name in configs:
        kind, arguments = drafter_recipe(name, base.num_layers)
        with torch.device("meta"):
            drafter = recipe.build(kind, base, arguments)
        operations = base_flops(config, size), drafter_flops(name, base, size)
        parts = seconds_of(operations, num_weights(drafter), devices)
        total = sum(parts)
        table.rows.append(
            [
                name.removesuffix(".yaml"),
                f"{num_weights(drafter) / 1e6:.0f}",
                *(f"{each / 1e12:.4g}" for each in operations),
                f"{total:.3g}",
                *(f"{part / total:.0%}" for part in parts),
                f"{devices.num_devices * num_tokens * 86400 / total / 1e9:.1f}",
            ]
        )
    table.notes.append(
        f"one step of a GPU is {size.num_rows} texts of {size.num_positions} tokens in bfloat16; matrix products reach "
        f"{devices.utilisation:.0%} of {devices.flops / 1e12:.0f} TFLOP/s, AdamW reads and writes 28 bytes a weight at "
        f"{devices.memory_bandwidth / 1e12} TB/s, gradients are exchanged at {devices.link_bandwidth / 1e9:.0f} GB/s; "
        "nothing overlaps, and reading data, validation and small kernels are left out"
    )
    return table


def base_flops(config: LlamaConfig, size: BatchSize) -> float:
    """Operations of a base's forward with its labels: two for each weight of layers and head, and causal attention."""
    num_kv_heads = config.num_key_value_heads or config.num_attention_heads
    width, kv_width = config.hidden_size, config.hidden_size * num_kv_heads // config.num_attention_heads
    layer = 2 * width * (width + kv_width) + 3 * width * config.intermediate_size  # weights
    attention = 2 * size.num_positions * width  # half of the scores and of the sums: the other half is masked
    weights = config.num_hidden_layers * layer + width * config.vocab_size
    return size.num_rows * size.num_positions * (2 * weights + config.num_hidden_layers * attention)


def drafter_flops(config: str, base: BaseShape, size: BatchSize) -> float:
    """Operations of a drafter's loss and its backward pass, counted in a step on tensors without data.

    The network's are counted on a whole text with a vocabulary of 64 tokens. What the loss adds for the vocabulary
    is counted on a short text, because it is proportional to the number of its terms.
    """
    small, num_anchors = replace(base, vocab_size=SMALL_VOCAB), config_anchors(config)
    network = count_flops(config, small, size.num_positions, num_anchors)
    few = min(num_anchors, FEW_ANCHORS)
    for_vocabulary = [count_flops(config, shape, SHORT, few) for shape in (base, small)]
    terms, few_terms = (num_anchors, few) if num_anchors else (size.num_positions - 2, SHORT - 2)
    return size.num_rows * (network + (for_vocabulary[0] - for_vocabulary[1]) * terms / few_terms)


def count_flops(config: str, base: BaseShape, num_positions: int, num_anchors: int) -> int:
    """Operations of a step on one text, without those of the base."""
    kind, arguments = with_anchors(config, base.num_layers, num_anchors)
    with torch.device("meta"):
        drafter = recipe.build(kind, base, arguments)
        embedding = torch.empty(base.vocab_size, base.hidden_size, dtype=torch.bfloat16)
    attention = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: sdpa_flop_count(*shapes[:3]),
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *shapes, **_: (
            sdpa_backward_flop_count(*shapes[:4])
        ),
    }
    with FlopCounterMode(display=False, custom_mapping=attention) as counter:
        step_bytes(drafter, BaseWeights(embedding, embedding), (1, num_positions), torch.bfloat16)
    return counter.get_total_flops()


def seconds_of(operations: tuple[float, float], num_weights: int, devices: Devices) -> tuple[float, ...]:
    """Seconds of a step: operations of base and drafter, what AdamW reads and writes, and the exchange of gradients.

    AdamW reads a weight, its gradient and two states and writes all but the gradient, 28 bytes in float32. A ring
    exchange of gradients sends each of them twice but for one share. Nothing overlaps.
    """
    base, drafter = (each / (devices.utilisation * devices.flops) for each in operations)
    exchanged = 2 * 4 * num_weights * (devices.num_devices - 1) / devices.num_devices
    return base, drafter, 28 * num_weights / devices.memory_bandwidth, exchanged / devices.link_bandwidth


if __name__ == "__main__":
    main(training_speed)
