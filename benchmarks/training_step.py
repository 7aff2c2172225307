"""What a training step of the CTC drafter costs beside the frozen base's forward alone, and memory by anchors."""

from __future__ import annotations

from bisect import bisect_right
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import median
from time import perf_counter as clock
from types import SimpleNamespace
from typing import Literal

import torch

from benchmarks.harness import SHAPES, Measured, in_turn, main, num_millions, random_llama, show, spread
from benchmarks.loss_memory import _resident
from drafters import CTC
from drafters.protocol import TrainingBatch
from inference.engine.base import Base, Dtype, resolve_device
from train.callbacks.estimate import memory, total
from train.feature_store.base_features import extract_features

# the 7B shape with a sixteenth of its width and of its vocabulary: layers and head weigh in it as they do in 7B
SHAPES["7b/16"] = (256, 688, 32, 4, 4)
FORWARD, LABELS, LOSS, STEP = "base: forward", "+ labels", "+ drafter: loss", "+ backward and AdamW = a step"
ARMS = FORWARD, LABELS, LOSS, STEP
CARD = 24e9


@dataclass(frozen=True)
class Setting:
    """What is trained, on what.

    Args:
        shape: Of the base, one of `SHAPES`.
        vocab_size: V.
        dtype: Of the base.
        precision: Of the drafter, whose weights are float32: bf16 computes under autocast.
        sizes: B and S.
        drafter: Arguments of `drafters.CTC`.
        threads: Of torch.
    """

    shape: str
    vocab_size: int
    dtype: Dtype
    precision: str
    sizes: tuple[int, int]
    drafter: dict
    threads: int


class Step:
    """One training step on random texts, all of them the assistant's; it can be left early.

    Args:
        setting: What is trained.
        base: Its base.
        num_anchors: A of each text.
    """

    def __init__(self, setting: Setting, base: Base, num_anchors: int) -> None:
        device = base.model.device
        torch.manual_seed(0)
        self.base, self.setting = base, setting
        self.drafter = CTC(base.shape, num_anchors=num_anchors, **setting.drafter).to(device)
        self.optimizer = torch.optim.AdamW(self.drafter.parameters())
        self.ids = torch.randint(setting.vocab_size, setting.sizes, device=device)
        self.mask = torch.ones_like(self.ids, dtype=torch.bool)

    @property
    def layers(self) -> tuple[int, ...]:
        return self.drafter.required_outputs.hidden_layers

    def run(self, arm: str) -> float:
        """Do what an arm names and all before it; a number of it, whose copy to the host waits for the device."""
        if arm == FORWARD:
            with torch.no_grad():
                return self.base.hidden_states(self.ids, self.layers)[1][0, 0, 0].item()
        hidden, last, labels = extract_features(self.base, self.layers, self.ids)
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
        started = clock()
        self.run(arm)
        if self.ids.is_cuda:
            torch.cuda.synchronize(self.ids.device)
        return clock() - started

    def estimated(self, num_rows: int | None = None) -> float:
        """Bytes at the worst moment, as `train.callbacks.estimate` prints them."""
        alone = SimpleNamespace(strategy=None, world_size=1)
        rows, positions = self.setting.sizes
        return total(memory(SimpleNamespace(base=self.base, drafter=self.drafter), alone, num_rows or rows, positions))

    def most_rows(self, available: float) -> int:
        """Texts of a batch that fits into some memory, by the estimate; 0 for none."""
        return bisect_right(range(1, 1024), available, key=self.estimated)


def base_of(setting: Setting, device: torch.device) -> Base:
    return random_llama(setting.shape, setting.vocab_size, setting.dtype, device, context=setting.sizes[1])


def peak_bytes(setting: Setting, num_anchors: int) -> int:
    """Peak of some steps on the CPU, weights included. To be called in a process of its own."""
    torch.set_num_threads(setting.threads)
    small = Setting("draft", 64, setting.dtype, setting.precision, (1, 16), setting.drafter, setting.threads)
    Step(small, base_of(small, torch.device("cpu")), 4).run(STEP)  # the libraries' own memory
    before, _ = _resident()
    step = Step(setting, base_of(setting, torch.device("cpu")), num_anchors)
    for _ in range(2):
        step.run(STEP)
    return _resident()[1] - before


def _peak(step: Step, num_anchors: int) -> int:
    device = step.ids.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step.run(STEP)
        return torch.cuda.max_memory_allocated(device)
    with ProcessPoolExecutor(1, get_context("spawn")) as alone:
        return alone.submit(peak_bytes, step.setting, num_anchors).result()


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
    """Time of a drafter's training step beside the base's forward alone; memory and tokens/s by anchors.

    Args:
        anchors: A of each text; the parts of a step are timed for the last.
        num_frames: T.
        num_labels: U.
        num_layers: Of the drafter's trunk.
        shape: Of the base: 7b on a GPU, on the CPU 7b/16, the same in a sixteenth of the width.
        vocab_size: V; 32000, for 7b/16 2000.
        dtype: Of the base.
        precision: Of the drafter's computations; its weights are float32.
        batch_size: B.
        length: S.
        device: auto takes the GPU where there is one.
        repeats: Timed runs of every arm, after one to warm up; arms in turn, another one first each time.
        threads: Of torch; 0 leaves them as they are.
        out: Markdown file for the tables.
    """
    place = resolve_device(device)
    if threads:
        torch.set_num_threads(threads)
    shape = shape or ("7b" if place.type == "cuda" else "7b/16")
    drafter = {"num_frames": num_frames, "num_labels": num_labels, "num_layers": num_layers, "objective": "ctc"}
    vocab_size = vocab_size or (2000 if shape == "7b/16" else 32000)
    sizes = batch_size, length
    setting = Setting(shape, vocab_size, dtype, precision, sizes, drafter, torch.get_num_threads())
    base = base_of(setting, place)
    title = f"{shape} ({num_millions(base)}), {dtype}, B = {batch_size}, S = {length}, T = {num_frames}"
    by_anchors = Measured(f"By anchors: {title}", ["A", "s a step", "tokens/s", "of base", "MB", "estimated", "24 GB"])
    for num_anchors in anchors:
        step = Step(setting, base, num_anchors)
        peak, seconds = _peak(step, num_anchors), timed(step, [FORWARD, STEP], repeats, f"A = {num_anchors}")
        middle = median(seconds[STEP])
        by_anchors.rows.append(
            [
                str(num_anchors),
                f"{middle:.3f}",
                f"{batch_size * length / middle:.0f}",
                f"{ratio(seconds[STEP], seconds[FORWARD]):.2f}",
                f"{peak / 1e6:.0f}",
                f"{step.estimated() / 1e6:.0f}",
                str(step.most_rows(CARD)),
            ]
        )
    parts = Measured(f"Parts of a step, A = {anchors[-1]}: {title}", ["what is done", "s", "of base", "spread"])
    seconds = timed(step, ARMS, repeats, "parts")
    for arm, taken in seconds.items():
        cells = f"{median(taken):.3f}", f"{ratio(taken, seconds[FORWARD]):.2f}", f"{spread(taken):.0%}"
        parts.rows.append([arm, *cells])
    parts.notes.append(f"each row with all above it; {repeats} repeats, arms in turn; drafter {num_layers} layers")
    by_anchors.notes.append(NOTE)
    show([parts, by_anchors], place, out)


NOTE = (
    "of base = to the base's forward without its head, repeat by repeat; MB = peak, all weights included, of a process "
    "of its own on the CPU, of torch's allocator on a GPU; estimated = what the training prints before its first step; "
    "24 GB = texts of a batch that fit there, by that estimate"
)


def timed(step: Step, arms: list[str] | tuple[str, ...], repeats: int, title: str) -> dict[str, list[float]]:
    """Seconds of each arm, in turn, after one run that warms up."""
    for arm in arms:
        step.run(arm)
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    for _, _, arm in in_turn(arms, 1, repeats, title):
        seconds[arm].append(step.seconds(arm))
    return seconds


def ratio(mine: list[float], theirs: list[float]) -> float:
    return median(a / b for a, b in zip(mine, theirs, strict=True))


if __name__ == "__main__":
    main(training)
