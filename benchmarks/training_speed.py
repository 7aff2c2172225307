"""Training speed of drafters on the same batches, with alternating steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from statistics import median
from time import perf_counter

import torch

import drafters
from benchmarks.experiment import Arm, SharedSettings
from benchmarks.harness import alternate
from data.module import ShareGPTData
from drafters import recipe
from train.modules.drafter_training import DrafterTraining


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
