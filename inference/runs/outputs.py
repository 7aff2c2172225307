"""What a command is to write, refused before any work is done where it cannot or must not be written."""

from __future__ import annotations

import os
from pathlib import Path


def new_file(out: str, overwrite: bool) -> Path:
    """The path of a file that is to be made; its folder need not be there yet.

    Raises:
        ValueError: The file is there already and not to be replaced, or cannot be made.
    """
    path = Path(out)
    if path.is_dir() or (path.exists() and not overwrite):
        raise ValueError(f"{out} is already there: give another name{'' if path.is_dir() else ', or --overwrite'}")
    folder_above(path)
    return path


def new_folder(out: str | None, overwrite: bool) -> Path | None:
    """The folder of results that are to be made, if any are.

    Raises:
        ValueError: It holds results already that are not to be replaced, or nothing can be made in it.
    """
    if out is None:
        return None
    folder = Path(out)
    folder_above(folder / "results.json")
    if any((folder / name).exists() for name in ("answers", "results.json")) and not overwrite:
        raise ValueError(f"{out} already holds results: give another --out, or --overwrite to replace them")
    return folder


def folder_above(path: Path) -> Path:
    """The nearest folder above a path that is there.

    Raises:
        ValueError: Nothing can be made in it.
    """
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        problem = "may not be written to" if above.is_dir() else "is a file"
        raise ValueError(f"{path} cannot be made: {above} {problem}; give another name")
    return above
