"""How a drafter is shared out over processes, the base being whole in each, and what it computes again."""

from __future__ import annotations

from datetime import timedelta

import lightning as L
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from drafters.learned.layers.transformer import Trunk
from drafters.protocol import LearnedDrafter


class FSDP2(ModelParallelStrategy):
    """Each process keeps a share of the drafter's weights, gradients and optimizer states (``fully_shard``).

    The drafter is one unit: its weights are gathered once a step, for losses and drafts read them in many places
    outside of ``forward``. A checkpoint is one ordinary file.

    Args:
        process_group_backend: nccl or gloo; left away, what the device wants.
        timeout: Seconds a process waits for the others.
    """

    def __init__(self, process_group_backend: str | None = None, timeout: int = 1800) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout),
        )

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes  # Lightning's ``auto`` is the nodes alone
        super().setup_environment()

    def shard(self, drafter: LearnedDrafter) -> None:
        """Share a drafter out; once, though every ``fit`` and ``validate`` asks."""
        if not isinstance(drafter, FSDPModule):
            fully_shard(drafter, mesh=self.device_mesh["data_parallel"], reshard_after_forward=False)
            for method in ("loss", "draft_at"):
                register_fsdp_forward_method(drafter, method)


def is_deepspeed(trainer: L.Trainer) -> bool:
    """Whether DeepSpeed trains, which hands out no gradients."""
    return isinstance(trainer.strategy, DeepSpeedStrategy)


def recompute(drafter: LearnedDrafter) -> None:
    """Let the layers of a drafter's trunk be computed again in the backward pass.

    Raises:
        ValueError: It has no trunk.
    """
    trunks = [module for module in drafter.modules() if isinstance(module, Trunk)]
    if not trunks:
        raise ValueError(f"{type(drafter).__name__} has no trunk to compute again: leave activation_checkpointing off")
    for trunk in trunks:
        trunk.is_recomputed = True
