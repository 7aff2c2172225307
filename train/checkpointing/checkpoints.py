"""Checkpoints that are whole or not there, and which one a run goes on from."""

from __future__ import annotations

import io
import os
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from drafters.atomic_write import atomic_write


class WholeCheckpoints(TorchCheckpointIO):
    """Writes a checkpoint beside its place, waits until it lies on the disk, and only then lets it take the place.

    A run that is killed at any moment leaves the old checkpoint or the new one. What is not a local path goes
    Lightning's own way.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint.

        Raises:
            ValueError: The disk does not take it; what stood at ``path`` still stands.
        """
        if "://" in str(path):
            return super().save_checkpoint(checkpoint, path, storage_options)
        path, buffer = Path(path), io.BytesIO()
        torch.save(checkpoint, buffer)  # through memory: torch dies where a file refuses its bytes
        try:
            with atomic_write(path) as new, new.open("wb") as file:
                file.write(buffer.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            _sync_folder(path.parent)
        except OSError as error:
            raise ValueError(
                f"the checkpoint {path} could not be written ({error.strerror}), and the one before it is kept: make "
                "room, then go on with --ckpt_path last"
            ) from error


def _sync_folder(folder: Path) -> None:
    """Wait until the folder's list of files, the new name among them, lies on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_whole(path: Path) -> None:
    """Read a checkpoint through once.

    Raises:
        ValueError: It is cut short or damaged. Of a folder, which DeepSpeed writes, only its last file is looked for.
    """
    if path.is_dir():
        if not (path / "latest").is_file():
            raise ValueError(f"{path} is not a readable checkpoint (no file latest, which DeepSpeed writes at the end)")
        return
    try:
        with ZipFile(path) as file:
            damaged = file.testzip()
    except (BadZipFile, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} is not a readable checkpoint ({error}): train or copy it again") from error
    if damaged:
        raise ValueError(f"{path} is not a readable checkpoint ({damaged} is damaged): train or copy it again")


def newest_whole(folders: Iterable[str | Path]) -> Path | None:
    """The checkpoint that ``--ckpt_path last`` means: the newest that can be read and goes on to be trained.

    ``last.ckpt`` is one of them like the others, so that it is no matter if a kill has left it missing, pointing at
    nothing, or behind. Each checkpoint that is passed over is named on standard error.

    Returns:
        None where there is no checkpoint at all.

    Raises:
        ValueError: There are checkpoints, but none that can be read.
    """
    names = [path for folder in folders for path in Path(folder).glob("*.ckpt")]
    names.sort(key=lambda path: path.stem == "last")
    found = {path.resolve(): path for path in names if path.exists()}  # of a file with two names, `last`
    for path in sorted(found.values(), key=lambda path: path.stat().st_mtime_ns, reverse=True):
        try:
            check_whole(path)
        except ValueError as error:
            print(f"passed over for an older one: {error}", file=sys.stderr)
            continue
        if path.is_dir() or "optimizer_states" in torch.load(path, "cpu", mmap=True, weights_only=True):
            return path
    if found:
        folder = names[0].parent
        raise ValueError(f"none of the checkpoints in {folder} can be gone on from: delete them to start anew")
    return None


def remove_unfinished(folder: str | Path) -> None:
    """Delete what a killed run was writing to a checkpoint folder."""
    for path in Path(folder).glob("*.ckpt.*.new"):
        path.unlink(missing_ok=True)
