"""Decoding with drafters, and measuring it: the verifier around a frozen base.

The public names are imported when they are first used, so that ``import inference`` itself loads no library.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inference.generation import Generated, IncrementalDetokenizer, generate, stream
    from inference.speculation import Speculation, speculate
    from inference.verifier.base import Base, load_base, prepare_process

__all__ = [
    "Base", "Generated", "IncrementalDetokenizer", "Speculation", "generate", "load_base", "prepare_process",
    "speculate", "stream",
]  # fmt: skip

_HOMES = {
    **dict.fromkeys(("Base", "load_base", "prepare_process"), "verifier.base"),
    **dict.fromkeys(("Generated", "IncrementalDetokenizer", "generate", "stream"), "generation"),
    **dict.fromkeys(("Speculation", "speculate"), "speculation"),
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
