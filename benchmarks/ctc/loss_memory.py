"""Peak memory and time of the CTC losses and their gradients, compared with F.ctc_loss on the full logits."""

from __future__ import annotations

from statistics import median
from time import perf_counter as clock
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness import ResultTable, alternate, call_in_new_process, main, resident_bytes, show, spread
from drafters.ctc.loss import BlankOutput, CTCLossOptions, ctc_loss
from drafters.losses.anchors import AnchoredFrames
from drafters.losses.chunks import MAX_BYTES
from drafters.losses.cross_entropy import cross_entropy
from drafters.nn.markov import Markov
from inference.verifier.base import Dtype, resolve_device

PLAIN, CTC, PREFIX, MARKOV, CROSS = "plain F.ctc_loss", "ctc", "prefix", "prefix, Markov bias", "cross-entropy"
DISTILLED = "prefix, Markov bias, distillation"
ARMS = PLAIN, CTC, PREFIX, MARKOV, DISTILLED, CROSS


class Anchors:
    """Random frames, labels with many repeats, and a random LM head.

    Args:
        sizes: A, T, U, D, V.
        dtype: Dtype of the head; the frames and the blank are float32, like trained weights.
        device: Device of all tensors.
        max_bytes: Memory of one chunk of the loss.
        rank: Rank of the Markov bias.
    """

    def __init__(self, sizes: tuple[int, ...], dtype: Dtype, device: torch.device, max_bytes: int, rank: int) -> None:
        num_anchors, num_frames, num_labels, width, num_tokens = sizes
        generator = torch.Generator(device).manual_seed(0)
        shape = num_anchors, num_frames, width
        self.frames = torch.randn(shape, generator=generator, device=device).requires_grad_()
        self.head = torch.empty(num_tokens, width, dtype=getattr(torch, dtype), device=device)
        self.head.normal_(0, width**-0.5, generator=generator)
        self.labels = torch.randint(num_tokens, (num_anchors, num_labels), generator=generator, device=device)
        repeats = torch.rand((num_anchors, num_labels - 1), generator=generator, device=device) < 0.1
        self.labels[:, 1:] = torch.where(repeats, self.labels[:, :-1], self.labels[:, 1:])
        self.roots, self.valid = self.labels[:, -1], torch.ones_like(self.labels, dtype=torch.bool)
        self.blank_row = torch.zeros(width, device=device, requires_grad=True)
        self.blank_bias = torch.tensor(-2.0, device=device, requires_grad=True)
        self.max_bytes, self.rank = max_bytes, rank
        self.markov = Markov(num_tokens, rank, num_tokens + 1).to(device)
        self.leaves = [self.frames, self.blank_row, self.blank_bias]
        self.teacher = torch.randn((num_anchors, num_labels, width), generator=generator, device=device)

    def loss(self, arm: str) -> Tensor:
        """Return the loss of an arm."""
        anchored = AnchoredFrames(self.frames, self.labels, self.valid, self.roots, self.teacher)
        if arm == PLAIN:
            return self._plain()
        if arm == CROSS:
            return cross_entropy(anchored, self.head, max_bytes=self.max_bytes)[0]
        bias = self.markov.factors(anchored.previous) if arm in (MARKOV, DISTILLED) else None
        options = CTCLossOptions(objective="ctc" if arm == CTC else "prefix")
        if arm == DISTILLED:
            options = CTCLossOptions(distillation=1.0, divergence="lk_hybrid")
        blank = BlankOutput(self.blank_row, self.blank_bias)
        return ctc_loss(anchored, self.head, blank, bias, options, max_bytes=self.max_bytes)[0]

    def _plain(self) -> Tensor:
        logits = (self.frames.to(self.head.dtype) @ self.head.T).float()
        blank = (self.frames @ self.blank_row + self.blank_bias)[..., None]
        log_probs = torch.cat([logits, blank], -1).log_softmax(-1)
        del logits
        num_anchors, num_labels = self.labels.shape
        num_frames = self.frames.shape[1]
        lengths = torch.full((num_anchors,), num_frames), torch.full((num_anchors,), num_labels)
        log_probs = log_probs.transpose(0, 1)
        costs = F.ctc_loss(log_probs, self.labels, *lengths, blank=len(self.head), reduction="none", zero_infinity=True)
        return costs.mean() / num_labels

    def drop_gradients(self) -> None:
        """Drop the gradients."""
        for leaf in (*self.leaves, *self.markov.parameters()):
            leaf.grad = None

    def step(self, arm: str) -> float:
        """Compute the loss with its gradient, and return the loss."""
        self.drop_gradients()
        loss = self.loss(arm)
        loss.backward()
        return loss.item()


def extra_bytes(sizes: tuple[int, ...], dtype: Dtype, max_bytes: int, rank: int, arm: str, threads: int) -> int:
    """Return the peak memory of one step on the CPU, without its inputs; to be called in a separate process."""
    torch.set_num_threads(threads)
    small = 2, *sizes[1:3], 16, 64
    Anchors(small, dtype, torch.device("cpu"), max_bytes, rank).step(arm)  # allocates the memory of the libraries
    anchors = Anchors(sizes, dtype, torch.device("cpu"), max_bytes, rank)
    before, _ = resident_bytes()
    anchors.step(arm)
    return resident_bytes()[1] - before


def _peak(anchors: Anchors, sizes: tuple[int, ...], dtype: Dtype, arm: str) -> int:
    device = anchors.head.device
    if device.type == "cuda":
        anchors.step(arm)
        anchors.drop_gradients()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        anchors.step(arm)
        return torch.cuda.max_memory_allocated(device) - before
    settings = anchors.max_bytes, anchors.rank, arm, torch.get_num_threads()
    return call_in_new_process(extra_bytes, sizes, dtype, *settings)


def _seconds(anchors: Anchors, arm: str) -> float:
    device = anchors.head.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = clock()
    anchors.step(arm)  # ends with a copy of the loss to the host
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - started


def loss_memory(
    num_anchors: int = 512,
    num_frames: int = 12,
    num_labels: int = 8,
    hidden_size: int | None = None,
    vocab_size: int = 32000,
    rank: int = 64,
    max_bytes: int = MAX_BYTES,
    dtypes: list[Dtype] = ["float32", "bfloat16"],  # noqa: B006
    arms: list[str] = [PLAIN, CTC, PREFIX],  # noqa: B006
    device: Literal["auto", "cpu", "cuda"] = "auto",
    repeats: int = 3,
    threads: int = 0,
    out: str | None = None,
) -> None:
    """Measure the extra memory and the time of the loss and its gradient, in chunks and on the full logits.

    Args:
        num_anchors: Number of anchors A.
        num_frames: Number of frames T.
        num_labels: Number of label tokens U.
        hidden_size: Hidden size D; by default 4096 on a GPU, and 128 on the CPU, where larger sizes take minutes.
        vocab_size: Vocabulary size V.
        rank: Rank of the Markov bias.
        max_bytes: Memory of one chunk in bytes.
        dtypes: Dtypes of the LM head.
        arms: What to compare with F.ctc_loss: ctc, prefix, "prefix, Markov bias", cross-entropy, or "prefix, Markov
            bias, distillation", which compares whole distributions.
        device: Device to run on; auto uses the GPU if there is one.
        repeats: Timed steps of every arm after a warm-up step; the arms alternate.
        threads: Number of torch threads; 0 keeps the default.
        out: Markdown file to write the tables to.
    """
    if min(num_anchors, num_frames, num_labels, vocab_size, rank, repeats) < 1 or num_frames < num_labels:
        raise ValueError("sizes and repeats must be at least 1, and num_frames at least num_labels")
    if unknown := set(arms) - set(ARMS):
        raise ValueError(f"unknown arm {sorted(unknown)[0]!r}: known are {'; '.join(ARMS)}")
    arms = [arm for arm in ARMS if arm in {PLAIN, *arms}]
    if threads:
        torch.set_num_threads(threads)
    torch_device = resolve_device(device)
    width = hidden_size or (4096 if torch_device.type == "cuda" else 128)
    sizes = num_anchors, num_frames, num_labels, width, vocab_size
    tables = []
    for dtype in dtypes:
        title = f"A = {num_anchors}, T = {num_frames}, U = {num_labels}, D = {width}, V = {vocab_size}, head {dtype}"
        anchors = Anchors(sizes, dtype, torch_device, max_bytes, rank)
        peaks = {arm: _peak(anchors, sizes, dtype, arm) for arm in arms}
        values = {arm: anchors.step(arm) for arm in arms}  # also the warm-up
        if CTC in arms and abs(values[CTC] - values[PLAIN]) > 1e-3 * abs(values[PLAIN]):
            raise ValueError(f"the losses differ: {values[CTC]} and F.ctc_loss's {values[PLAIN]}")
        seconds: dict[str, list[float]] = {arm: [] for arm in arms}
        for _, _, arm in alternate(arms, 1, repeats, title):
            seconds[arm].append(_seconds(anchors, arm))
        tables.append(_table(title, peaks, seconds, values))
    tables[-1].notes.append(f"chunks of {max_bytes / 2**20:.0f} MiB, {repeats} repeats, arms alternate. {NOTE}")
    show(tables, torch_device, out)


NOTE = (
    "MB = additional peak memory of one loss with its gradient, measured in a separate process on the CPU and by "
    "torch's allocator on a GPU; s = median; ratios to the plain F.ctc_loss, those of times repeat by repeat; "
    "spread = (slowest - fastest) / median."
)


def _table(title: str, peaks: dict[str, int], seconds: dict[str, list[float]], values: dict[str, float]) -> ResultTable:
    table = ResultTable(title, ["arm", "MB", "of plain", "s", "of plain", "spread", "loss"])
    for arm, times in seconds.items():
        ratio = median(mine / plain for mine, plain in zip(times, seconds[PLAIN], strict=True))
        cells = [arm, f"{peaks[arm] / 1e6:.1f}", f"{peaks[arm] / max(peaks[PLAIN], 1):.3f}", f"{median(times):.3f}"]
        table.rows.append([*cells, f"{ratio:.2f}", f"{spread(times):.0%}", f"{values[arm]:.4f}"])
    return table


if __name__ == "__main__":
    main(loss_memory)
