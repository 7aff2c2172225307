"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """A new file beside ``path`` to write, which takes its place when the block ends well and is gone otherwise.

    Its folder is made where it is not there. Whatever writes it, its permissions are those that `open` gives.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        new.touch()
        mode = new.stat().st_mode
        yield new
        new.chmod(mode)  # safetensors makes files that only their owner reads
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
