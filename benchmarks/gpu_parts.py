"""The parts of the GPU page. They share one large base, which computes what tiny-chat does (`benchmarks.widening`).

Every time stands beside the bytes that must be read in it, at the bandwidth that the first part measures: with a graph
for all its launches, decoding takes about as long as reading them.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import nan
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import IO, Any

import lightning as L
import numpy as np
import torch

from benchmarks import at_scale, steps
from benchmarks.harness import SHAPES, ResultTable, num_millions, times_bytes
from benchmarks.recipes import grouped
from benchmarks.training_speed import TrainingStep, drafter_recipe
from benchmarks.widening import widen_base
from data.dtypes import Dtype
from data.files import read_json, write_text
from drafters import recipe
from drafters.nn.graph import captured
from drafters.protocol import LearnedDrafter
from inference.options import QuestionOptions
from inference.verifier.base import Base, load_base
from inference.verifier.graphed import NUM_ROWS, make_runner
from inference.verifier.runner import Runner
from inference.verifier.session import PHASES, Session
from train.memory import memory_parts

SMALL_BASE, DRAFTER, CONFIG = "checkpoints/tiny-chat", "ctc=checkpoints/tiny-chat-ctc", "llama3_8b.yaml"
KINDS = (steps.EAGER, steps.GRAPHED)
NUM_WARM_UP = 3
ROWS = (1, 16, 64)  # fed tokens of a step
CONTEXT = 16_384  # positions of the large base; no rotation depends on it


@dataclass(frozen=True)
class Sizes:
    """How much the parts measure."""

    shape: str
    vocab_size: int
    draft_vocab_size: int
    dtype: Dtype
    sweep_bytes: int
    num_launches: int
    contexts: tuple[int, ...]  # cached positions before it
    repeats: int
    draft_context: int
    num_questions: int
    max_new_tokens: int
    batch_size: tuple[int, int]  # of a training step: B, S
    num_anchors: int  # of a text; 0 for that of the configuration
    asked: str  # the questions of `drafters verify`


FULL = Sizes(
    shape="8b",
    vocab_size=128_256,
    draft_vocab_size=32_000,
    dtype="bfloat16",
    sweep_bytes=15 * 10**9,
    num_launches=2000,
    contexts=(256, 2048, 8192),
    repeats=20,
    draft_context=2048,
    num_questions=4,
    max_new_tokens=64,
    batch_size=(8, 1024),
    num_anchors=0,
    asked="--limit 4 --max_new_tokens 48",
)
TINY = Sizes(
    shape="grouped",
    vocab_size=2000,
    draft_vocab_size=1200,
    dtype="float32",
    sweep_bytes=10**8,
    num_launches=50,
    contexts=(16, 32, 64),
    repeats=2,
    draft_context=32,
    num_questions=1,
    max_new_tokens=8,
    batch_size=(2, 48),
    num_anchors=8,
    asked="--limit 1 --max_new_tokens 4",
)


class Machine:
    """A device, how much is measured on it, the folder of the page, and the bases that the parts share."""

    def __init__(self, device: torch.device, sizes: Sizes, folder: Path) -> None:
        self.device, self.sizes, self.folder = device, sizes, folder
        self._runners: dict[str, Runner] = {}

    @cached_property
    def small(self) -> Base:
        """The trained base."""
        return load_base(SMALL_BASE, "float32", self.device)

    @cached_property
    def base(self) -> Base:
        """The large base that computes the same."""
        sizes = self.sizes
        dtype = getattr(torch, sizes.dtype)
        wide = widen_base(self.small, f"tiny-chat at {sizes.shape}", SHAPES[sizes.shape], sizes.vocab_size, dtype)
        wide.model.config.max_position_embeddings = CONTEXT
        return wide

    def runner(self, kind: str) -> Runner:
        """The runner of eager or of graphed steps; raises ValueError if the base cannot be graphed."""
        if kind not in self._runners:
            self._runners[kind] = make_runner(replace(self.base, graphed=kind == steps.GRAPHED))
            # Else each longer text would have other graphs.
            self._runners[kind].reset(max(self.sizes.contexts) + NUM_ROWS[-1])
        return self._runners[kind]

    def release(self) -> None:
        """Give the memory of the bases back; they are made again when they are needed."""
        for name in ("base", "small"):
            self.__dict__.pop(name, None)
        self.release_runners()

    def release_runners(self) -> None:
        """Give the memory of caches and graphs back."""
        self._runners.clear()
        gc.collect()
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # of a device that an error has left useless
                torch.cuda.empty_cache()

    def clock(self) -> float:
        """The time in seconds at which all queued work is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @property
    def bandwidth(self) -> float:
        """Bytes a second that the first part has measured, in this run or in an earlier one; NaN if it has not."""
        path = self.folder / "card.json"
        return read_json(path)["bandwidth"] if path.exists() else nan


Part = Callable[[Machine], Iterator["ResultTable | str"]]


def card(machine: Machine) -> Iterator[ResultTable]:
    """The bandwidth of reading, and what a launch costs."""
    sizes, device = machine.sizes, machine.device
    memory, count = torch.ones(sizes.sweep_bytes // 4, device=device), sizes.num_launches
    sweep = _fastest(machine, lambda: [chunk.sum() for chunk in memory.split(2**28)])
    num_bytes = memory.nbytes
    number = torch.zeros(1, device=device)
    launch = _fastest(machine, lambda: [number.add_(1) for _ in range(count)])
    replay = _fastest(machine, captured(lambda: [number.add_(1) for _ in range(count)], device))
    write_text(machine.folder / "card.json", json.dumps({"bandwidth": num_bytes / sweep}) + "\n")
    table = ResultTable("Bandwidth and launches", ["what", "value"])
    table.rows += [
        [f"reading {num_bytes / 1e9:.1f} GB", f"{1e3 * sweep:.2f} ms: {num_bytes / sweep / 1e9:.0f} GB/s"],
        ["a launch", f"{1e6 * launch / count:.2f} µs"],
        ["a launch in a graph", f"{1e6 * replay / count:.2f} µs"],
    ]
    yield table


def _fastest(machine: Machine, run: Callable[[], object]) -> float:
    """Seconds of the fastest of five runs after one."""
    times = []
    for _ in range(6):
        started = machine.clock()
        run()
        times.append(machine.clock() - started)
    return min(times[1:])


def base_steps(machine: Machine) -> Iterator[ResultTable]:
    """Steps of the large base, eager and graphed; only eager where graphed ones fail."""
    sizes, base, kinds = machine.sizes, machine.base, [*KINDS]
    trees = {rows - 1: steps.bushy(rows - 1, base.shape.vocab_size) for rows in ROWS}
    failure: Exception | None = None

    def measured(context: int) -> ResultTable:
        title = f"Steps of {base.name} ({num_millions(base)}), {sizes.dtype}, context {context}"
        runners = {kind: machine.runner(kind) for kind in kinds}
        return steps.measure(title, base, runners, trees, context, sizes.repeats, machine.bandwidth)

    for context in sizes.contexts:
        try:
            table = measured(context)
        except (ValueError, RuntimeError) as error:
            if failure:
                raise
            kinds, failure = [steps.EAGER], error
            table = measured(context)
        yield table
    if failure:
        raise failure


def drafts(machine: Machine) -> Iterator[ResultTable]:
    """Drafts of CTC with one and three layers, with the whole and a draft vocabulary, eager and graphed."""
    sizes, context = machine.sizes, machine.sizes.draft_context
    headings = ["layers", "vocabulary", "GB"]
    headings += [f"{kind} {name}" for kind in KINDS for name in ("ms", "/ bytes", "of the base's step")]
    for num_layers in (1, 3):
        table = ResultTable(f"Drafts of {CONFIG} with {num_layers} layers, context {context}", headings)
        for vocab_size in (None, sizes.draft_vocab_size):
            drafter = _fresh(machine.base, num_layers, vocab_size)
            num_bytes = draft_bytes(drafter, machine.base, context)
            row = [str(num_layers), f"{vocab_size or sizes.vocab_size:,}", f"{num_bytes / 1e9:.2f}"]
            table.rows.append(row)
            for kind in KINDS:
                try:
                    draft, base_step = _draft_seconds(machine.runner(kind), drafter, context, sizes.repeats)
                except Exception:
                    yield table
                    raise
                row += [f"{1e3 * draft:.3f}", times_bytes(draft, num_bytes, machine.bandwidth)]
                row.append(f"{draft / base_step:.0%}")
        table.notes.append(
            f"Medians of {sizes.repeats} steps of a session, fresh weights. A draft is propose and observe; the base's "
            "step is forward, accept and commit, of as many rows as are drafted."
        )
        yield table


def _fresh(base: Base, num_layers: int, vocab_size: int | None) -> LearnedDrafter:
    """An untrained drafter of the configuration, whose trees fit into a graph of the base."""
    options = {"num_layers": num_layers, "draft_vocab_size": vocab_size, "num_nodes": NUM_ROWS[-1] - 1}
    kind, arguments = drafter_recipe(CONFIG, base.shape.num_layers)
    with base.model.device:
        drafter = recipe.build(kind, base.shape, grouped(kind, options, arguments))
    drafter.to(base.model.dtype).eval().requires_grad_(False).initialise(base.base_weights)
    base.lend_weights_to(drafter)
    return drafter


def _draft_seconds(runner: Runner, drafter: LearnedDrafter, context: int, repeats: int) -> tuple[float, float]:
    """Median seconds of a draft, and of the base's part of a step."""
    session, end = Session(runner, drafter), context + 64 * (NUM_WARM_UP + repeats)
    session.begin(np.random.default_rng(1).integers(0, runner.vocab_size, context).tolist(), reserve=end)
    times = [dict(zip(PHASES, session.step(end)[1].seconds, strict=True)) for _ in range(NUM_WARM_UP + repeats)]
    drafts = [each["propose"] + each["observe"] for each in times[NUM_WARM_UP:]]
    return median(drafts), median(sum(each.values()) for each in times[NUM_WARM_UP:]) - median(drafts)


def draft_bytes(drafter: LearnedDrafter, base: Base, context: int) -> int:
    """Bytes that a draft must read: the drafter's weights, the head's rows that it multiplies, and its KV cache."""
    weights = dict(drafter.named_parameters())
    head = base.base_weights.head
    tokens = getattr(drafter, "draft_tokens", None)
    num_rows = len(head) if tokens is None else len(tokens)
    cached = [each for name, each in weights.items() if name.endswith(("k_proj.weight", "v_proj.weight"))]
    cache = sum(context * len(each) * each.element_size() for each in cached)
    return sum(each.nbytes for each in weights.values()) + num_rows * head[0].nbytes + cache


def sessions(machine: Machine) -> Iterator[ResultTable]:
    """Whole answers with CTC beside those of the base alone, graphed and then eager."""
    sizes, small, base = machine.sizes, machine.small, machine.base
    options = QuestionOptions(["embedded"], sizes.num_questions, ":", sizes.max_new_tokens, at_scale.TEMPLATE)
    (prompts,) = options.select(small, options.load()).values()
    specs = {at_scale.NONE: at_scale.NONE, "ctc": DRAFTER}
    shared = "identical", "acceptance", "small base's", "fed", "speed-up", "step, ms"
    columns = {name: at_scale.COLUMNS[name] for name in shared} | {"ms/token": "{ms_per_token:.3f}"}
    columns |= {phase: f"{{phases_ms[{phase}]:.2f}}" for phase in PHASES}
    for kind in (steps.GRAPHED, steps.EAGER):
        figures = at_scale.compare(small, machine.runner(kind), specs, prompts.questions, sizes.max_new_tokens)
        table = ResultTable(f"Sessions, {kind}", ["drafter", *columns, "GB", "/ bytes"])
        for name, own in figures.items():
            num_bytes = steps.step_bytes(base, 0) + (own["parameters"] > 0) * (
                own["parameters"] * base.model.dtype.itemsize + base.base_weights.head.nbytes
            )
            cells = [column.format_map(own) for column in columns.values()]
            of_bytes = times_bytes(own["step_ms"] / 1e3, num_bytes, machine.bandwidth)
            table.rows.append([name, *cells, f"{num_bytes / 1e9:.2f}", of_bytes])
        table.notes.append(
            f"{len(prompts.questions)} embedded questions, at most {sizes.max_new_tokens} tokens a turn, greedy; "
            "medians of steps, without the prefill. identical: answers that are those of none in this table; in "
            "bfloat16 near-ties flip. accept waits for what forward has queued, propose for what observe has. Bytes "
            "are those of the weights, as the KV caches are short."
        )
        yield table


def training(machine: Machine) -> Iterator[ResultTable]:
    """A training step: its peak memory beside the estimate of `lightning fit`, and its time."""
    sizes = machine.sizes
    machine.release_runners()
    base, precision = machine.base, "bf16" if sizes.dtype == "bfloat16" else "32"
    kind, arguments = drafter_recipe(CONFIG, base.shape.num_layers, sizes.num_anchors)
    step = TrainingStep(kind, arguments, base, sizes.batch_size, precision)
    trainer = L.Trainer(accelerator="auto", devices=1, logger=False, enable_checkpointing=False, barebones=True)
    module: Any = SimpleNamespace(base=base, drafter=step.drafter, shard_base=False, runs_base=lambda _: True)
    estimates = memory_parts(module, trainer, sizes.batch_size, step.autocast)
    peak, estimate = step.peak(), sum(estimates.values())
    texts = f"{sizes.batch_size[0]} texts of {sizes.batch_size[1]} tokens"
    table = ResultTable(f"Memory of a step of {CONFIG} on {texts}", ["what", "GB"])
    table.rows = [["measured", f"{peak / 1e9:.2f}"], ["estimated", f"{estimate / 1e9:.2f}"]]
    table.rows += [[f"estimated: {name}", f"{each / 1e9:.2f}"] for name, each in estimates.items()]
    yield table
    times = [step.step() for _ in range(3)]
    trained = sum(weight.nbytes for weight in step.drafter.parameters())
    frozen = sum(weight.nbytes for weight in base.model.parameters())
    num_bytes = dict(zip(times[0], (frozen, 2 * trained + base.base_weights.head.nbytes, 4 * trained), strict=True))
    table = ResultTable(f"Time of a step of {CONFIG} on {texts}", ["phase", "s", "GB", "/ bytes"])
    for phase, each in num_bytes.items():
        seconds = median(every[phase] for every in times)
        table.rows.append([phase, f"{seconds:.3f}", f"{each / 1e9:.2f}", times_bytes(seconds, each, machine.bandwidth)])
    whole = median(sum(every.values()) for every in times)
    table.notes.append(
        f"{np.prod(sizes.batch_size) / whole:.0f} tokens/s; medians of three steps. drafter: with its loss, forward "
        "and backward. Bytes are those of the weights, in the optimizer also of gradients and moments; a step computes "
        "for longer than it reads."
    )
    yield table


def run_command(template: str, machine: Machine) -> Iterator[str]:
    """Run a command, in which ``{asked}`` and ``{out}`` are filled in, and show what it prints."""
    machine.release()
    line, stopped = template.format(asked=machine.sizes.asked, out=machine.folder), None
    with TemporaryFile() as output, TemporaryFile() as errors:
        process = subprocess.Popen(line, shell=True, stdout=output, stderr=errors, start_new_session=True)
        try:
            process.wait()
        except TimeoutError as error:
            stopped = error
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
            process.wait()
        printed, said = (_read(file) for file in (output, errors))
    yield f"```sh\n{line}\n```\n" + (f"\n```text\n{printed}\n```" if printed else "")
    if stopped:
        raise stopped
    if process.returncode:
        raise ChildProcessError((said.splitlines() or [f"exit code {process.returncode}"])[-1])


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace").replace("`", "'").strip()


VERIFY = f"drafters verify --drafter joint --drafter {DRAFTER} {{asked}}"
FIT = "rm -rf {out}/fit; lightning fit --config ctc.yaml --config debug.yaml --trainer.default_root_dir {out}/fit"
FIT += " --trainer.accelerator auto --trainer.precision bf16-mixed --trainer.enable_progress_bar false"
PARTS: dict[str, tuple[float, Part]] = {  # the seconds that a part may take
    "card": (20, card),
    "steps": (150, base_steps),
    "drafts": (60, drafts),
    "sessions": (90, sessions),
    "training": (90, training),
    "graphed, lossless": (60, partial(run_command, f"{VERIFY} --forward graphed")),
    "lossless": (40, partial(run_command, VERIFY)),
    "bit-identical": (40, partial(run_command, f"{VERIFY} --dtype bfloat16 --bitwise true")),
    "fit": (60, partial(run_command, FIT)),
    "FSDP2": (60, partial(run_command, f"{FIT} --config strategy/fsdp.yaml")),
    "DeepSpeed 2": (60, partial(run_command, f"{FIT} --config strategy/deepspeed_2.yaml")),
    "DeepSpeed 3": (60, partial(run_command, f"{FIT} --config strategy/deepspeed_3.yaml")),
}
