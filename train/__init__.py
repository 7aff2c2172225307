"""Training: the LightningModules, the ``lightning`` and ``drafters`` commands, and export.

A training starts in `cli`, which builds the LightningModule of `modules` with the `callbacks`; `validation` simulates
decoding, `checkpointing` writes and reads checkpoints, `export` turns one into a drafter folder. `feature_store`
computes hidden states ahead of training, and `tools` holds small commands. The classes that configs name can be
written without their module: ``train.DrafterTraining``, ``train.BaseTraining``, ``train.FSDP2``,
``train.AveragedWeights``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.base_training import BaseTraining
    from train.callbacks.averaged_weights import AveragedWeights
    from train.module import DrafterTraining
    from train.strategies import FSDP2

__all__ = ["FSDP2", "AveragedWeights", "BaseTraining", "DrafterTraining"]

_MODULES = {
    "AveragedWeights": "train.callbacks.averaged_weights",
    "BaseTraining": "train.base_training",
    "DrafterTraining": "train.module",
    "FSDP2": "train.strategies",
}


def __getattr__(name: str) -> Any:
    """Import a public class when it is first used, so that the commands' help needs no torch."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
