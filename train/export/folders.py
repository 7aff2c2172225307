"""The folder that `drafters export` and `drafters import` write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.files import atomic_folder, write_checksums

WEIGHTS = "model.safetensors", "model.safetensors.index.json"


def check_output_folder(folder: Path, overwrite: bool) -> None:
    """Raise ValueError if the folder holds other files, or a model that must not be replaced."""
    if any((folder / name).exists() for name in WEIGHTS) and not overwrite:
        raise ValueError(f"{folder} already holds a model: give another folder, or --overwrite to replace it")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "config.json").exists():
        raise ValueError(f"{folder} holds other files, and no drafter or base (config.json): give another folder")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that gets checksums and replaces ``folder`` when it is whole."""
    with atomic_folder(folder, replaced=["model*.safetensors*"]) as new:
        yield new
        write_checksums(new)
