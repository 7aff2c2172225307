"""Training: the LightningModule, the ``lightning`` and ``drafters`` commands, and export.

A training starts in `cli`, which builds `module` with its `callbacks`; `validation` simulates decoding, `checkpoints`
writes and reads checkpoints, `export` turns one into a drafter folder, in our own format or one of `formats`, and
`features` computes hidden states ahead of training. The classes that configs name can be written without their module:
``train.FSDP2``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.module import DrafterTraining
    from train.strategies import FSDP2

__all__ = ["FSDP2", "DrafterTraining"]

_MODULES = {"DrafterTraining": "module", "FSDP2": "strategies"}


def __getattr__(name: str) -> Any:
    """Import a public class when it is first used, so that the commands' help needs no torch."""
    if name in _MODULES:
        return getattr(import_module(f"train.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
