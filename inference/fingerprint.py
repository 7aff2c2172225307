"""A short identity of files by their content, to notice that a model was replaced by another of the same name."""

from __future__ import annotations

import hashlib
from pathlib import Path

BLOCK_BYTES, NUM_BLOCKS = 1 << 16, 16  # what is read of each file, spread evenly from its beginning to its end


def fingerprint(name: str | Path | None) -> str:
    """Hash the names, sizes and samples of the content of a folder's files, or of one file.

    Copies have the same fingerprint; a drafter that was trained again has another one, even under the same name.

    Args:
        name: A file, a folder, or what may be one: a hub id or None has the empty fingerprint.
    """
    path = Path(name or "").expanduser()
    if not name or not path.exists():
        return ""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path)} {size}".encode())
        with file.open("rb") as stream:
            for block in range(NUM_BLOCKS):
                stream.seek(max(0, size - BLOCK_BYTES) * block // (NUM_BLOCKS - 1))
                digest.update(stream.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]
