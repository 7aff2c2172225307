"""Checks of output paths, made before any work is done."""

from __future__ import annotations

import os
from pathlib import Path


def new_file(out: str, overwrite: bool) -> Path:
    """Return the path of a file to write; its folder need not exist yet.

    Raises:
        ValueError: The file exists and must not be replaced, or it cannot be created.
    """
    path = Path(out)
    if path.is_dir() or (path.exists() and not overwrite):
        raise ValueError(f"{out} is already there: give another name{'' if path.is_dir() else ', or --overwrite'}")
    folder_above(path)
    return path


def new_folder(out: str | None, overwrite: bool) -> Path | None:
    """Return the folder for the results of a command, or None if no folder was chosen.

    Raises:
        ValueError: The folder holds results that must not be replaced, or it cannot be created.
    """
    if out is None:
        return None
    folder = Path(out)
    folder_above(folder / "results.json")
    if any((folder / name).exists() for name in ("answers", "results.json")) and not overwrite:
        raise ValueError(f"{out} already holds results: give another --out, or --overwrite to replace them")
    return folder


def folder_above(path: Path) -> Path:
    """Return the nearest parent folder that exists.

    Raises:
        ValueError: Nothing can be created in it.
    """
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        problem = "is not writable" if parent.is_dir() else "is a file"
        raise ValueError(f"{path} cannot be made: {parent} {problem}; give another name")
    return parent
