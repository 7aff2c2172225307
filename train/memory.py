"""The memory that a training needs on one device, estimated before its first step by a step on tensors without data."""

import copy
import resource
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from rich.filesize import decimal
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from data.files import cause_of
from data.rows import lengths
from data.safe_text import SafeConsole
from drafters.dry_run import dry_run
from drafters.protocol import BaseWeights, LearnedDrafter, TrainingBatch
from inference.verifier.base import Base
from train.module import DrafterTraining
from train.strategies import FSDP2


class MemoryEstimate(L.Callback):
    """Prints what is trained, and the memory that a device will need for its largest batch, by purpose.

    For a GPU these are the tensors of a training step, without what its allocator keeps of freed memory; elsewhere they
    are the whole process. Validation is not included.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        data: Any = getattr(trainer, "datamodule", None)
        if stage != "fit" or not trainer.is_global_zero or not isinstance(pl_module, DrafterTraining) or data is None:
            return
        base, drafter = pl_module.base, pl_module.drafter
        num_trained = sum(weight.numel() for weight in drafter.parameters())
        print(
            f"training {num_trained:,} parameters of {type(drafter).__name__}; "
            f"the base {base.name} stays frozen ({base.model.num_parameters():,} parameters, {base.model.dtype})"
        )
        sizes = largest_batches(lengths(data.train_set), data.hparams["batch_size"], data.hparams["max_tokens"])
        device = trainer.strategy.root_device
        with trainer.precision_plugin.train_step_context():
            is_autocast = torch.is_autocast_enabled(device.type)
            autocast_dtype = torch.get_autocast_dtype(device.type) if is_autocast else None
        try:
            estimates = [(memory_parts(pl_module, trainer, size, autocast_dtype), size) for size in sizes]
        except Exception as error:  # the drafter of another package may read numbers, which such a step has not
            print(f"the memory of {type(drafter).__name__} cannot be estimated: {cause_of(error)}")
            return
        parts, size = max(estimates, key=lambda estimate: sum(estimate[0].values()))
        if device.type != "cuda":
            pages = Path("/proc/self/statm")  # the peak would include what loading needed
            now = int(pages.read_text().split()[1]) * resource.getpagesize() if pages.exists() else peak_bytes(device)
            loaded = parts["weights of the base"] + num_bytes(drafter)
            parts = {"Python and its libraries": max(0, now - loaded)} | parts
        show(parts, size, torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None)


def largest_batches(text_lengths: Sequence[int], batch_size: int, max_tokens: int | None) -> list[tuple[int, int]]:
    """Return B and S of the batches that may need most: of the longest texts, and of as many as a batch can have.

    >>> largest_batches([300, 1000, 2048], batch_size=8, max_tokens=8192)
    [(4, 2048), (8, 1000)]
    """
    longest, max_tokens = max(text_lengths), max_tokens or batch_size * max(text_lengths)
    fitting = [length for length in text_lengths if batch_size * length <= max_tokens]
    sizes = {(min(batch_size, max(1, max_tokens // longest)), longest)}
    return sorted(sizes | ({(batch_size, max(fitting))} if fitting else set()))


def memory_parts(
    module: DrafterTraining, trainer: L.Trainer, size: tuple[int, int], autocast_dtype: torch.dtype | None = None
) -> dict[str, float]:
    """Return the bytes at the worst moment of a training step on one device, by purpose.

    ``size`` is the B and S of a batch, and ``autocast_dtype`` that of the trainer's autocast, if it has one. Must be
    called before the trainer shards the weights of the module.
    """
    base, drafter, strategy, device = module.base, module.drafter, trainer.strategy, trainer.strategy.root_device.type
    is_sharded = isinstance(strategy, FSDP2 | DeepSpeedStrategy)
    share = 1 / trainer.world_size if is_sharded else 1.0
    # FSDP2 gathers all weights beside the shard of each device, and DDP copies all gradients, unless they are views.
    has_copies = isinstance(strategy, DDPStrategy) and not strategy._ddp_kwargs.get("gradient_as_bucket_view")
    has_buckets = has_copies and not is_sharded and trainer.world_size > 1
    of_base, weights = num_bytes(base.model, base), num_bytes(drafter)
    decoder: Any = base.model.base_model
    layers = [num_bytes(layer, base) for layer in getattr(decoder, "layers", None) or ()]
    if not module.runs_base(trainer):
        of_base -= sum(layers)
    elif module.shard_base:  # the own part of the layers, and two whole ones: one runs while the next is gathered
        of_base -= sum(layers) * (1 - 1 / trainer.world_size) - 2 * max(layers)
    shape, head, num_tokens = base.shape, base.base_weights.head, size[0] * size[1]
    fused = len(drafter.required_outputs.hidden_layers)
    hidden = head.element_size() * num_tokens * shape.hidden_size * (fused + 1)
    # In a layer, the gate and the up projection and their product; then the logits of one text.
    layer = num_tokens * (4 * shape.hidden_size + 3 * shape.intermediate_size)
    forward = head.element_size() * max(layer, size[1] * shape.vocab_size)
    step = step_bytes(drafter, base.base_weights, size, autocast_dtype, device)
    return {
        "weights of the base": of_base,
        "weights of the drafter": weights * (1 + share * isinstance(strategy, FSDP2)),
        "their gradients": weights * (share + has_buckets),
        "their AdamW states": 2 * weights * share,
        "hidden states and activations": hidden + max(forward if module.runs_base(trainer) else 0, step),
    }


def step_bytes(
    drafter: LearnedDrafter,
    base_weights: BaseWeights,
    size: tuple[int, int],
    autocast_dtype: torch.dtype | None = None,
    device_type: str = "cpu",
) -> int:
    """Return the bytes that a loss and its backward pass need besides weights, gradients and hidden states.

    A copy of the drafter takes the step on a batch in which every token counts. Weights, hidden states and what is made
    of them have a shape and no data; ids, masks and anchors are real, because other tensors' sizes depend on them.
    """
    dtype, hidden_size = base_weights.head.dtype, base_weights.head.shape[1]
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = {
            id(w): nn.Parameter(torch.empty(w.shape, dtype=w.dtype), w.requires_grad) for w in drafter.parameters()
        }
        for weight in fakes.values():
            weight.grad = torch.empty_like(weight) if weight.requires_grad else None
        embedding, head = (torch.empty(w.shape, dtype=dtype) for w in (base_weights.embedding, base_weights.head))
        last = torch.empty(*size, hidden_size, dtype=dtype)
        hidden = torch.empty(*size, hidden_size * len(drafter.required_outputs.hidden_layers), dtype=dtype)
    trained = copy.deepcopy(drafter, dict(fakes))  # a copy of a weight is what the memo has for it
    token = dict(trained.named_buffers()).get("draft_tokens", torch.zeros(1, dtype=torch.long))[0]
    ids, mask = token.repeat(size), torch.ones(size, dtype=torch.bool)
    existing = [*trained.parameters(), *trained.buffers(), embedding, head, last, hidden, ids, mask]
    existing += [weight.grad for weight in trained.parameters() if weight.grad is not None]
    with dry_run(device_type), torch.random.fork_rng(devices=[]), LiveBytes(*existing) as live:
        with torch.autocast("cpu", autocast_dtype, enabled=autocast_dtype is not None):
            loss, _ = trained.loss(TrainingBatch(hidden, last, ids, ids, mask), BaseWeights(embedding, head))
        loss.backward()
    return live.peak


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations return while it is entered: ``peak`` is their largest sum.

    Tensors that exist already, and results that share their memory, do not count.
    """

    def __init__(self, *existing: Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._storages = {tensor.untyped_storage()._cdata for tensor in existing}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._count, result)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages.add(storage._cdata)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, address: int, num_bytes: int) -> None:
        self._storages.discard(address)
        self.now -= num_bytes


def num_bytes(module: nn.Module, base: Base | None = None) -> float:
    """Return the size of a module's weights; of a base or a part of it, the size where the base will run."""
    return sum(w.numel() * (base.dtype_of(w) if base else w.dtype).itemsize for w in module.parameters())


def show(parts: dict[str, float], size: tuple[int, int], available: int | None) -> None:
    """Print the estimated bytes by purpose and in total, beside those that are available on a GPU."""
    table, total = Table("", "", show_header=False), sum(parts.values())
    table.columns[1].justify = "right"
    for name, part in parts.items():
        table.add_row(name, readable(part))
    table.add_section()
    table.add_row("at the worst moment", readable(total) + (f" of {readable(available)}" if available else ""))
    console = SafeConsole()
    of_what = "tensors on a GPU" if available else "a process"
    console.print(f"memory of {of_what} in a training step on {size[0]} texts of {size[1]} tokens, estimated")
    console.print(table)
    if available and total > 0.95 * available:
        console.print(
            "That is more than there is: lower data.batch_size (and raise trainer.accumulate_grad_batches), "
            "data.max_length or the drafter's num_anchors, or pass --model.base_dtype nf4 or, for CTC and block, "
            "--model.activation_checkpointing true"
        )


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory so far: of torch's allocator on a GPU, of the whole process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def readable(num_bytes: float) -> str:
    """Return a size with its unit, like 1.50 GB."""
    return decimal(round(num_bytes), precision=2)
