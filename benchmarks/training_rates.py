"""How fast drafters train, side by side: the same batches, one step of each in turn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from statistics import median
from time import perf_counter

import torch

import drafters
from benchmarks.experiment import Arm, Common
from benchmarks.harness import in_turn
from data.module import ShareGPTData
from train.modules.drafter_training import DrafterTraining


def training_rates(arms: Sequence[Arm], common: Common, num_batches: int = 8) -> dict[str, float]:
    """Tokens of text a second that each arm trains on, the forward of the base among it: the median over batches.

    Args:
        arms: What to train; nothing is kept of it.
        common: Base, text and batches; its feature store is not read.
        num_batches: After one batch that warms each arm up.
    """
    data = ShareGPTData(
        common.base, common.files, val_size=0, max_length=common.max_length, batch_size=common.batch_size
    )
    data.setup("fit")
    batches = list(islice(data.train_dataloader(), num_batches + 1))
    modules = {}
    for arm in arms:
        torch.manual_seed(0)
        kind = getattr(drafters, arm.drafter)
        modules[arm.name] = DrafterTraining(common.base, lambda base, kind=kind, arm=arm: kind(base, **arm.arguments))
    optimizers = {name: torch.optim.AdamW(module.drafter.parameters()) for name, module in modules.items()}
    rates: dict[str, list[float]] = {name: [] for name in modules}
    for _, index, name in in_turn(list(modules), len(batches), 1, "training steps"):
        module, batch = modules[name], batches[index]
        started = perf_counter()
        loss, _ = module.drafter.loss(module.look(batch["input_ids"], batch["loss_mask"]), module.base.base_weights)
        loss.backward()
        optimizers[name].step()
        optimizers[name].zero_grad()
        rates[name].append(int(batch["lengths"].sum()) / (perf_counter() - started))
    return {name: median(found[1:] or found) for name, found in rates.items()}
