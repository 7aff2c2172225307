"""AdamW, Muon, and the learning rate schedule of a training."""

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Literal, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from inference.timing import processor_name
from train.strategies import FSDP2, is_deepspeed

Schedule = Literal["constant", "linear", "cosine"]
OptimizerName = Literal["adamw", "muon"]


def adamw(module: L.LightningModule, learning_rate: float, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW, with weight decay on matrices only, not on biases, norms and other vectors."""
    return _adamw([weight for weight in module.parameters() if weight.requires_grad], learning_rate, weight_decay)


def muon(module: L.LightningModule, learning_rate: float, weight_decay: float) -> torch.optim.Optimizer:
    """Muon for the weights of linear layers, and AdamW for all others.

    Updates are scaled to the size that AdamW's typically have, so one learning rate serves both (Moonlight, arXiv
    2502.16982); the best one may differ from that of AdamW alone. Output layers over the vocabulary, embeddings and
    vectors are trained by AdamW. A module whose own parameters are linear maps, too, names them in ``linear_maps``.
    Raises ValueError if the strategy shards the matrices that Muon needs whole.
    """
    if isinstance(module.trainer.strategy, FSDP2) or is_deepspeed(module.trainer):
        raise ValueError("optimizer muon needs whole matrices, which FSDP and DeepSpeed shard: use adamw, or DDP")
    linear: set[int] = set()
    for layer in module.modules():
        names = ("weight",) if isinstance(layer, nn.Linear) else getattr(layer, "linear_maps", ())
        linear |= {id(getattr(layer, name)) for name in names}
    inner: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            (inner if id(parameter) in linear and "lm_head" not in name else others).append(parameter)
    return JointOptimizer(Muon(inner, learning_rate, weight_decay), _adamw(others, learning_rate, weight_decay))


OPTIMIZERS: dict[OptimizerName, Callable[..., torch.optim.Optimizer]] = {"adamw": adamw, "muon": muon}


class JointOptimizer(torch.optim.Optimizer):
    """Several optimizers, of different parameters, that Lightning and learning rate schedules see as one.

    They share their parameter groups and their state with it.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self._share()

    def _share(self) -> None:
        start = 0
        for optimizer in self.optimizers:
            end = start + len(optimizer.param_groups)
            optimizer.state, optimizer.param_groups = self.state, self.param_groups[start:end]
            start = end

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call the closure once, then take a step with each optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()


def _adamw(parameters: list[nn.Parameter], learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    is_fused = all(parameter.is_cuda for parameter in parameters)  # needs no temporary copy; a CPU's rounds otherwise
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=is_fused or None)
    # It could undo the scaling of gradients itself, and Lightning would refuse to clip them, even in bfloat16.
    optimizer._step_supports_amp_scaling = False
    return optimizer


def with_schedule(
    module: L.LightningModule, optimizer: torch.optim.Optimizer, warmup_steps: int, schedule: Schedule
) -> OptimizerLRSchedulerConfig:
    """An optimizer with a linear warm-up, then a constant learning rate or a linear or cosine decay to zero.

    The decay ends with the last step, or with ``trainer.max_time``, whichever is nearer. Raises ValueError if the
    training has neither.
    """
    num_steps = max(1, module.trainer.estimated_stepping_batches)
    timer = timer_of(module.trainer)
    if schedule != "constant" and math.isinf(num_steps) and timer is None:
        raise ValueError(
            f"schedule {schedule} needs an end of the training: give trainer.max_steps, trainer.max_epochs or "
            "trainer.max_time, or take model.schedule constant"
        )

    @lru_cache(maxsize=1)  # asked once for each group of parameters
    def progress(step: int) -> float:
        return min(1.0, max(step / num_steps, share_of_time(module.trainer, timer) if timer else 0.0))

    def factor(step: int) -> float:
        warm_up = min(1.0, (step + 1) / max(1, warmup_steps))
        if schedule == "constant":
            return warm_up
        done = progress(step)
        return warm_up * (1 - done if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def timer_of(trainer: L.Trainer) -> Timer | None:
    """The callback that ends a training with a ``max_time``."""
    timers = (callback for callback in getattr(trainer, "callbacks", []) if isinstance(callback, Timer))
    return next((timer for timer in timers if timer.time_remaining() is not None), None)


def share_of_time(trainer: L.Trainer, timer: Timer) -> float:
    """The share of ``trainer.max_time`` that has passed: the mean of all processes, so that their rates are equal."""
    elapsed = timer.time_elapsed()
    share = elapsed / (elapsed + cast(float, timer.time_remaining()))
    if trainer.world_size == 1:
        return share  # without waiting for the device
    return float(trainer.strategy.reduce(torch.tensor(share, device=trainer.strategy.root_device), reduce_op="mean"))


def is_accumulating(trainer: L.Trainer) -> bool:
    """Whether the gradients of the running batch are only accumulated, so that no optimizer step follows it."""
    return trainer.fit_loop._should_accumulate()


# ---- Muon

NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315
"""Coefficients of the quintic iteration, chosen for a steep slope at zero (Jordan 2024)."""
MOMENTUM = 0.95  # share of the average of the gradients that is kept at each step


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, as the update of each matrix (Jordan 2024).

    Updates are scaled by 0.2 sqrt(max(rows, columns)), to the size that those of AdamW have (Moonlight, arXiv
    2502.16982, section 2.2). This is `torch.optim.Muon` but for two things: it runs on PyTorch before 2.9, and
    multiplies in float32 on a CPU without instructions for bfloat16, and on Intel's without AMX. The weight decay is
    decoupled as in AdamW.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step, as one of a `JointOptimizer`, which calls the closure."""
        for group in self.param_groups:
            rate = group["lr"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight.grad)
                average = state["momentum_buffer"].lerp_(weight.grad, 1 - MOMENTUM)
                update = orthogonalised(weight.grad.lerp(average, MOMENTUM))
                weight.mul_(1 - rate * group["weight_decay"])
                weight.add_(update, alpha=-rate * 0.2 * math.sqrt(max(weight.shape)))


def orthogonalised(matrix: Tensor) -> Tensor:
    """The matrix with its singular values moved close to one, by five Newton-Schulz iterations.

    They end between 0.6 and 1.3, but for those below about a thousandth of the matrix's norm.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrix.to(_working_dtype(matrix.device))
    x = x.T if len(matrix) > matrix.shape[1] else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if len(matrix) > matrix.shape[1] else x).to(matrix.dtype)


@lru_cache
def _working_dtype(device: torch.device) -> torch.dtype:
    if device.type != "cpu" or torch.cpu._is_amx_tile_supported():
        return torch.bfloat16
    # An Intel Xeon with AVX-512 but without AMX multiplied 512 x 896 x 4864 in it at 0.55 times the speed of float32.
    is_fast = torch.cpu._is_avx512_bf16_supported() and "Intel" not in processor_name()
    return torch.bfloat16 if is_fast else torch.float32
