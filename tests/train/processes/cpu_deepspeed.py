"""DeepSpeed on CPUs, where Lightning offers it on CUDA alone: a double for tests, with everything but the device."""

import argparse
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

# Its own communication through shared memory would be compiled first, for a minute and a half; gloo does as well.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class CPUDeepSpeed(DeepSpeedStrategy):
    """As `DeepSpeedStrategy`, over gloo; at stage 3 every weight is shared out, however small."""

    def setup_environment(self):
        DDPStrategy.setup_environment(self)

    def setup_distributed(self):
        reset_seed()
        self.set_world_ranks()
        self._process_group_backend = "gloo"
        self._init_deepspeed_distributed()
        self.config["zero_optimization"]["stage3_param_persistence_threshold"] = 0

    def _get_process_group_backend(self):
        return "gloo"

    def _setup_model_and_optimizer(self, model, optimizer, lr_scheduler=None):
        engine, optimizer, _, _ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=-1),  # a CPU has no number
            config=self.config,
            model=model,
            model_parameters=[weight for weight in model.parameters() if weight.requires_grad],
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
        return engine, optimizer
