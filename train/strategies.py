"""Sharding of the drafter and of the base's layers over processes, and activation checkpointing."""

from datetime import timedelta
from typing import Any

import lightning as L
import torch
import torch.distributed
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from drafters.nn.transformer import Trunk
from drafters.protocol import LearnedDrafter
from inference.verifier.base import Base

GATHERING = "loss", "draft_at"
"""Methods of a drafter, besides ``forward``, that gather the weights which `FSDP2` shards."""


class FSDP2(ModelParallelStrategy):
    """Shard the drafter's weights, gradients and optimizer states over the processes with ``fully_shard``.

    The drafter is a single unit, whose weights are gathered once per step, because the loss and the drafting methods
    read them in many places outside of ``forward``. Checkpoints are ordinary single files.

    Args:
        process_group_backend: nccl or gloo. By default, the one that suits the device.
        timeout: Seconds that a process waits for the others before it gives up.
    """

    def __init__(self, process_group_backend: str | None = None, timeout: int = 1800) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout),
        )

    def setup_environment(self) -> None:
        # Lightning's "auto" would be the number of nodes, without the processes on each of them.
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def shard(self, drafter: LearnedDrafter) -> None:
        """Shard a drafter, unless an earlier ``fit`` or ``validate`` has done it already."""
        if not isinstance(drafter, FSDPModule):
            assert self.device_mesh is not None, "the process group is set up before the model"
            fully_shard(drafter, mesh=self.device_mesh["data_parallel"], reshard_after_forward=False)
            for method in GATHERING:
                register_fsdp_forward_method(drafter, method)


def shard_layers(base: Base, device: torch.device) -> None:
    """Shard the weights of a base's decoder layers over all processes, which then must run the base equally often.

    Each layer gathers its weights when it runs, and frees them afterwards. The embedding, the norms and the LM head,
    which drafters read, stay whole. The base computes the same as before, bit for bit. It is changed in place, unless
    an earlier ``fit`` or ``validate`` has done it already, and the sharded weights are moved to ``device``, that of
    this process. Raises ValueError if the base's decoder has no list of layers.
    """
    decoder: Any = base.model.base_model
    if isinstance(decoder, FSDPModule):
        return
    if not hasattr(decoder, "layers"):
        raise ValueError(f"the layers of a {base.model.config.model_type} base cannot be sharded: leave shard_base off")
    whole = set(decoder.parameters()) - set(decoder.layers.parameters())
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for layer in decoder.layers:
        base.move_to(device, layer)
        fully_shard(layer, mesh=mesh)
    fully_shard(decoder, mesh=mesh, ignored_params=whole)  # so that a layer is gathered while the one before it runs


def is_deepspeed(trainer: L.Trainer) -> bool:
    """Whether the strategy is DeepSpeed, which does not give access to the gradients."""
    return isinstance(trainer.strategy, DeepSpeedStrategy)


def whole_weights(drafter: LearnedDrafter) -> dict[str, torch.Tensor]:
    """The weights in float32 of a drafter that DeepSpeed shards; all processes must ask for them at once."""
    from deepspeed.utils import safe_get_full_fp32_param

    return {
        name: safe_get_full_fp32_param(weight).cpu() if weight.requires_grad else weight.detach().cpu()
        for name, weight in drafter.state_dict(keep_vars=True).items()
    }


def gathers_in_forwards(trainer: L.Trainer) -> bool:
    """Whether each forward of a module gathers its weights, as DeepSpeed's stage 3 does with several processes."""
    return trainer.world_size > 1 and getattr(trainer.strategy, "zero_stage_3", False)


def gathered_weights(drafter: LearnedDrafter) -> dict[str, torch.Tensor]:
    """A copy of the weights that DeepSpeed's stage 3 shards; all processes must ask for them at once."""
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([*drafter.parameters()]):
        return {name: weight.detach().clone() for name, weight in drafter.state_dict(keep_vars=True).items()}


def enable_activation_checkpointing(drafter: LearnedDrafter) -> None:
    """Recompute the layers of the drafter's trunk in the backward pass instead of storing their activations.

    Raises ValueError if the drafter has no trunk.
    """
    trunks = [module for module in drafter.modules() if isinstance(module, Trunk)]
    if not trunks:
        raise ValueError(f"{type(drafter).__name__} has no trunk to compute again: leave activation_checkpointing off")
    for trunk in trunks:
        trunk.is_recomputed = True
