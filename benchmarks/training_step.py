"""Time of a training step of the CTC drafter relative to the base's forward, and its memory by number of anchors."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from statistics import median
from time import perf_counter as clock
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch

from benchmarks.harness import (
    SHAPES,
    ResultTable,
    alternate,
    call_in_new_process,
    main,
    num_millions,
    random_llama,
    resident_bytes,
    show,
    spread,
)
from drafters import CTC, recipe
from drafters.protocol import TrainingBatch
from inference.engine.base import Base, Dtype, resolve_device
from train.callbacks.memory import estimate_memory, peak_memory
from train.feature_store.base_features import compute_features

# The 7B shape with a sixteenth of the width and vocabulary: layers and head have the same shares of the work.
SHAPES["7b/16"] = (256, 688, 32, 4, 4)
FORWARD, LABELS, LOSS, STEP = "base: forward", "+ labels", "+ drafter: loss", "+ backward and AdamW = a step"
ARMS = FORWARD, LABELS, LOSS, STEP
GPU_BYTES = 24e9


@dataclass(frozen=True)
class TrainingSetting:
    """The training that is measured.

    Args:
        shape: Shape of the base, one of `SHAPES`.
        vocab_size: Vocabulary size V.
        dtype: Dtype of the base.
        precision: Precision of the drafter, whose weights are float32; bf16 uses autocast.
        sizes: Batch size B and length S.
        drafter: Arguments of `drafters.CTC`.
        threads: Number of torch threads.
    """

    shape: str
    vocab_size: int
    dtype: Dtype
    precision: str
    sizes: tuple[int, int]
    drafter: dict
    threads: int


class TrainingStep:
    """A training step on random texts with a full loss mask; parts of it can be run separately.

    Args:
        setting: The training.
        base: The base.
        num_anchors: Number of anchors A of each text.
    """

    def __init__(self, setting: TrainingSetting, base: Base, num_anchors: int) -> None:
        device = base.model.device
        torch.manual_seed(0)
        self.base, self.setting = base, setting
        self.drafter = recipe.build(CTC, base.shape, {"num_anchors": num_anchors, **setting.drafter}).to(device)
        self.optimizer = torch.optim.AdamW(self.drafter.parameters())
        self.ids = torch.randint(setting.vocab_size, setting.sizes, device=device)
        self.mask = torch.ones_like(self.ids, dtype=torch.bool)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of the base that the drafter reads."""
        return self.drafter.required_outputs.hidden_layers

    def run(self, arm: str) -> float:
        """Run the part of a step that an arm names, and all parts before it.

        The returned number has no meaning; copying it to the host waits for the device.
        """
        if arm == FORWARD:
            with torch.no_grad():
                return self.base.hidden_states(self.ids, self.layers)[1][0, 0, 0].item()
        hidden, last, labels = compute_features(self.base, self.layers, self.ids)
        if arm == LABELS:
            return labels[0, 0].item()
        with torch.autocast(self.ids.device.type, torch.bfloat16, enabled=self.setting.precision == "bf16"):
            loss, _ = self.drafter.loss(
                TrainingBatch(hidden, last, self.ids, labels, self.mask), self.base.base_weights
            )
        if arm == STEP:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.item()

    def seconds(self, arm: str) -> float:
        """Return the seconds of `run`."""
        started = clock()
        self.run(arm)
        if self.ids.is_cuda:
            torch.cuda.synchronize(self.ids.device)
        return clock() - started

    def estimated(self, num_rows: int | None = None) -> float:
        """Return the peak memory in bytes that `train.callbacks.memory` predicts."""
        # The estimate reads these attributes only of a LightningModule and of a Trainer.
        module = cast(Any, SimpleNamespace(base=self.base, drafter=self.drafter))
        trainer = cast(Any, SimpleNamespace(strategy=None, world_size=1))
        rows, positions = self.setting.sizes
        return peak_memory(estimate_memory(module, trainer, num_rows or rows, positions))

    def max_rows(self, available: float) -> int:
        """Return the largest batch size that fits into the memory by the estimate, or 0."""
        return bisect_right(range(1, 1024), available, key=self.estimated)


def base_of(setting: TrainingSetting, device: torch.device) -> Base:
    """Return a random base of the setting's shape."""
    return random_llama(setting.shape, setting.vocab_size, setting.dtype, device, context=setting.sizes[1])


def peak_bytes(setting: TrainingSetting, num_anchors: int) -> int:
    """Return the peak memory of some steps on the CPU, including weights; to be called in a separate process."""
    torch.set_num_threads(setting.threads)
    small = TrainingSetting("draft", 64, setting.dtype, setting.precision, (1, 16), setting.drafter, setting.threads)
    TrainingStep(small, base_of(small, torch.device("cpu")), 4).run(STEP)  # allocates the memory of the libraries
    before, _ = resident_bytes()
    step = TrainingStep(setting, base_of(setting, torch.device("cpu")), num_anchors)
    for _ in range(2):
        step.run(STEP)
    return resident_bytes()[1] - before


def _peak(step: TrainingStep, num_anchors: int) -> int:
    device = step.ids.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step.run(STEP)
        return torch.cuda.max_memory_allocated(device)
    return call_in_new_process(peak_bytes, step.setting, num_anchors)


def training(
    anchors: list[int] = [64, 128, 256, 512],  # noqa: B006
    num_frames: int = 12,
    num_labels: int = 8,
    num_layers: int = 1,
    shape: str | None = None,
    vocab_size: int | None = None,
    dtype: Dtype = "bfloat16",
    precision: Literal["32", "bf16"] = "bf16",
    batch_size: int = 1,
    length: int = 2048,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    repeats: int = 3,
    threads: int = 0,
    out: str | None = None,
) -> None:
    """Measure the parts of a drafter's training step, and memory and tokens/s by the number of anchors.

    Args:
        anchors: Numbers of anchors A of each text; the parts of a step are timed for the last one.
        num_frames: Number of frames T.
        num_labels: Number of label tokens U.
        num_layers: Number of layers of the drafter's trunk.
        shape: Shape of the base; by default 7b on a GPU, and 7b/16 on the CPU, which has a sixteenth of the width.
        vocab_size: Vocabulary size V; by default 32000, and 2000 for 7b/16.
        dtype: Dtype of the base.
        precision: Precision of the drafter's computations; its weights are float32.
        batch_size: Batch size B.
        length: Length S of the texts.
        device: Device to run on; auto uses the GPU if there is one.
        repeats: Timed runs of every arm after a warm-up run; the arms alternate.
        threads: Number of torch threads; 0 keeps the default.
        out: Markdown file to write the tables to.
    """
    torch_device = resolve_device(device)
    if threads:
        torch.set_num_threads(threads)
    shape = shape or ("7b" if torch_device.type == "cuda" else "7b/16")
    drafter = {"num_frames": num_frames, "num_labels": num_labels, "num_layers": num_layers, "objective": "ctc"}
    vocab_size = vocab_size or (2000 if shape == "7b/16" else 32000)
    sizes = batch_size, length
    setting = TrainingSetting(shape, vocab_size, dtype, precision, sizes, drafter, torch.get_num_threads())
    base = base_of(setting, torch_device)
    title = f"{shape} ({num_millions(base)}), {dtype}, B = {batch_size}, S = {length}, T = {num_frames}"
    headings = ["A", "s/step", "tokens/s", "of base", "MB", "estimated", "24 GB"]
    by_anchors = ResultTable(f"By anchors: {title}", headings)
    for num_anchors in anchors:
        step = TrainingStep(setting, base, num_anchors)
        peak_memory, seconds = _peak(step, num_anchors), timed(step, [FORWARD, STEP], repeats, f"A = {num_anchors}")
        middle = median(seconds[STEP])
        by_anchors.rows.append(
            [
                str(num_anchors),
                f"{middle:.3f}",
                f"{batch_size * length / middle:.0f}",
                f"{ratio(seconds[STEP], seconds[FORWARD]):.2f}",
                f"{peak_memory / 1e6:.0f}",
                f"{step.estimated() / 1e6:.0f}",
                str(step.max_rows(GPU_BYTES)),
            ]
        )
    parts = ResultTable(f"Parts of a step, A = {anchors[-1]}: {title}", ["part", "s", "of base", "spread"])
    seconds = timed(step, ARMS, repeats, "parts")
    for arm, times in seconds.items():
        cells = f"{median(times):.3f}", f"{ratio(times, seconds[FORWARD]):.2f}", f"{spread(times):.0%}"
        parts.rows.append([arm, *cells])
    note = f"each row includes all above it; {repeats} repeats, arms alternate; drafter with {num_layers} layers"
    parts.notes.append(note)
    by_anchors.notes.append(NOTE)
    show([parts, by_anchors], torch_device, out)


NOTE = (
    "of base = relative to the base's forward without its head, repeat by repeat; MB = peak memory including all "
    "weights, measured in a separate process on the CPU and by torch's allocator on a GPU; estimated = what the "
    "training prints before its first step; 24 GB = batch size that fits into 24 GB by that estimate"
)


def timed(step: TrainingStep, arms: list[str] | tuple[str, ...], repeats: int, title: str) -> dict[str, list[float]]:
    """Return the seconds of each arm; the arms alternate after a warm-up run of each."""
    for arm in arms:
        step.run(arm)
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    for _, _, arm in alternate(arms, 1, repeats, title):
        seconds[arm].append(step.seconds(arm))
    return seconds


def ratio(mine: list[float], theirs: list[float]) -> float:
    """Return the median of the ratios, repeat by repeat."""
    return median(a / b for a, b in zip(mine, theirs, strict=True))


if __name__ == "__main__":
    main(training)
