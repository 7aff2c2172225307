"""Writes checkpoints atomically, and finds the one that a run continues from."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, cast
from zipfile import BadZipFile, ZipFile

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from data.files import DiskError, atomic_write


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint to a temporary file, waits until it is on the disk, and then renames it.

    A run that is killed at any moment leaves either the old checkpoint or the new one. Paths that are not local are
    written by Lightning as usual.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint.

        Raises:
            ValueError: The disk refuses it, for example because it is full; the file at ``path`` is left as it was.
        """
        if "://" in str(path):
            return super().save_checkpoint(checkpoint, path, storage_options)
        path = Path(path)
        try:
            if path.is_symlink():  # `last.ckpt` of a run that linked it to another checkpoint
                path.unlink()
            with atomic_write(path) as new, open(new, "wb") as file:
                writer = _Writer(file)
                torch.save(checkpoint, cast(BinaryIO, writer))  # it needs ``write`` and ``flush`` only
                if writer.error:
                    raise writer.error
        except (OSError, DiskError) as error:
            cause = error.__cause__ if isinstance(error, DiskError) else error
            raise ValueError(
                f"the checkpoint {path} could not be written ({getattr(cause, 'strerror', cause)}), and the one before "
                "it is kept: make room, then go on with --ckpt_path last"
            ) from error


class _Writer:
    """What `torch.save` writes to: it aborts the process if a write raises, so the first error is kept in ``error``."""

    error: BaseException | None = None

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: memoryview) -> int:
        self._try(lambda: self._file.write(data))
        return data.nbytes

    def flush(self) -> None:
        self._try(self._file.flush)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            if self.error is None:
                action()
        except BaseException as error:  # Ctrl-C too
            self.error = error


def check_complete(path: Path) -> None:
    """Read a checkpoint once to see that it is complete.

    In a folder, which DeepSpeed writes, only the file that is written last is looked for.

    Raises:
        ValueError: The checkpoint is truncated or damaged.
    """
    if path.is_dir():
        if not (path / "latest").is_file():
            raise ValueError(f"{path} is not a readable checkpoint (no file latest, which DeepSpeed writes at the end)")
        return
    if not path.is_file():
        raise ValueError(
            f"{path} is not a readable checkpoint (no such file): give the .ckpt that `lightning fit` wrote"
        )
    try:
        with ZipFile(path) as file:
            damaged = file.testzip()
    except (BadZipFile, EOFError, OSError, RuntimeError, NotImplementedError, ValueError, zlib.error) as error:
        raise ValueError(f"{path} is not a readable checkpoint ({error}): train or copy it again") from error
    if damaged:
        raise ValueError(f"{path} is not a readable checkpoint ({damaged} is damaged): train or copy it again")


def newest_complete(folders: Iterable[str | Path]) -> Path | None:
    """Return the checkpoint that ``--ckpt_path last`` stands for: the newest that is complete and can be continued.

    ``last.ckpt`` is treated like all others, because a killed run may have left it missing, outdated, or as a link to
    nothing. Each checkpoint that is skipped is named on standard error.

    Returns:
        The path, or None if there is no checkpoint at all.

    Raises:
        ValueError: There are checkpoints, but none of them can be read.
    """
    names = [path for folder in folders for path in Path(folder).glob("*.ckpt")]
    names.sort(key=lambda path: path.stem == "last")
    # A file with two names keeps `last`, which comes last in the list.
    unique = {path.resolve(): path for path in names if path.exists()}
    for path in sorted(unique.values(), key=lambda path: path.stat().st_mtime_ns, reverse=True):
        try:
            check_complete(path)
        except ValueError as error:
            print(f"passed over for an older one: {error}", file=sys.stderr)
            continue
        if path.is_dir() or "optimizer_states" in torch.load(path, "cpu", mmap=True, weights_only=True):
            return path
    if unique:
        folder = names[0].parent
        raise ValueError(f"none of the checkpoints in {folder} can be resumed: delete them to start over")
    return None


def remove_unfinished(folder: str | Path) -> None:
    """Delete the temporary files that a killed run has left in a checkpoint folder."""
    for path in Path(folder).glob("*.ckpt.*.new"):
        path.unlink(missing_ok=True)
