"""Checkpoints: written atomically, found again, and read without running any code that they contain."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import ZipFile, is_zipfile

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from data.files import DiskError, atomic_write, cause_of, reading

WHOLE_WEIGHTS = "whole_weights"
"""The key under which checkpoints of DeepSpeed, which shards the weights, hold those of the drafter in one piece."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint to a temporary file, waits until it is on the disk, and then renames it.

    A run that is killed at any moment leaves either the old checkpoint or the new one. Paths that are not local are
    written by Lightning as usual.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint.

        Raises ValueError if the disk refuses it, for example because it is full; the file at ``path`` is left as it
        was.
        """
        if "://" in str(path):
            return super().save_checkpoint(checkpoint, path, storage_options)
        path = Path(path)
        if path.is_symlink():  # `last.ckpt` of a run that linked it to another checkpoint
            path.unlink()
        try:
            with atomic_write(path) as new, new.open("wb") as stream:
                torch.save(checkpoint, stream)
        except (OSError, RuntimeError, DiskError) as error:
            reason = cause_of(error.__context__ if isinstance(error.__context__, OSError) else error)
            raise ValueError(
                f"the checkpoint {path} could not be written ({reason}), and what was there before is kept: "
                "make room, then go on with --ckpt_path last"
            ) from error

    def load_checkpoint(self, path: str | Path, *args: Any, **options: Any) -> dict[str, Any]:
        with reading_checkpoint(path):
            return super().load_checkpoint(path, *args, **options)


def check_complete(path: Path) -> None:
    """Read a checkpoint once to see that it is complete; of DeepSpeed's folder, look for the file written last.

    Raises ValueError if the checkpoint is cut short or damaged.
    """
    try:
        if path.is_dir():
            problem = None if (path / "latest").is_file() else "no file latest, which DeepSpeed writes at the end"
        else:
            with ZipFile(path) as file:
                problem = file.testzip()
    except Exception as error:  # zip and I/O errors have types of their own
        problem = cause_of(error)
    if problem:
        raise ValueError(f"{path} is not a readable checkpoint ({problem}): train or copy it again")


def newest_complete(folders: Iterable[str | Path]) -> Path | None:
    """Return the checkpoint that ``--ckpt_path last`` stands for: the newest that is complete and can be continued.

    ``last.ckpt`` is treated like all others, because a killed run may have left it missing, outdated, or as a link to
    nothing. Each checkpoint that is skipped is named on standard error. Raises ValueError if there are checkpoints, but
    none of them can be continued; if there is none at all, the path is None.
    """
    paths = (path for folder in set(folders) for path in Path(folder).glob("*.ckpt"))
    names = sorted(paths, key=lambda path: path.stem == "last")
    # A file with two names keeps `last`, which comes last in the list.
    unique = {path.resolve(): path for path in names if path.exists()}
    ends = {path: path / "latest" if (path / "latest").is_file() else path for path in unique.values()}
    for path in sorted(ends, key=lambda path: ends[path].stat().st_mtime_ns, reverse=True):
        try:
            check_complete(path)
        except ValueError as error:
            print(f"passed over for an older one: {error}", file=sys.stderr)
            continue
        if path.is_dir() or "optimizer_states" in torch.load(path, "cpu", mmap=True, weights_only=True):
            return path
    if unique:
        raise ValueError(f"no checkpoint in {names[0].parent} can be resumed: delete them to start over")
    return None


# ---- reading


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a Lightning checkpoint, a file or DeepSpeed's folder, without the optimizer states of the latter.

    Raises ValueError if there is no checkpoint at this path, or it is damaged.
    """
    if (path / "latest").is_file():
        remedy = "copy the whole checkpoint of DeepSpeed again or, if an older version wrote it, train one more step"
        with reading(path, remedy):
            folder = path / (path / "latest").read_text(encoding="utf-8").strip()
            saved = _load(min(folder.glob("*_model_states.pt"), default=folder / "mp_rank_00_model_states.pt"))
            return saved | {"state_dict": saved[WHOLE_WEIGHTS]}
    if path.is_dir():
        files = [str(file.relative_to(path)) for file in sorted(path.rglob("*.ckpt"))]
        raise ValueError(f"{path} is a folder: give a checkpoint{' in it, one of ' if files else ''}{', '.join(files)}")
    if not path.is_file():
        raise ValueError(f"no checkpoint at {path}: give the .ckpt that `lightning fit` wrote")
    return _load(path)


def _load(path: Path) -> dict[str, Any]:
    if is_zipfile(path):  # torch does not compare the checksums in it
        check_complete(path)
    with reading_checkpoint(path):
        return torch.load(path, map_location="cpu", weights_only=True)


@contextmanager
def reading_checkpoint(path: str | Path) -> Iterator[None]:
    """Turn what torch raises for a file that it cannot read, or that holds code, into ValueError."""
    try:
        yield
    except (UnpicklingError, RuntimeError, EOFError) as error:  # torch's message suggests to run the code in it
        raise ValueError(
            f"{path} is not a readable checkpoint: it is cut off, another kind of file, or holds more than weights and "
            "numbers; give the .ckpt that `lightning fit` wrote"
        ) from error
