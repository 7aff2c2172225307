"""SHA-256 checksums of the files in a folder, in the form that ``sha256sum --check`` reads."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

CHECKSUMS = "SHA256SUMS"
LINE = re.compile(r"(?P<digest>[0-9a-f]{64}) [ *](\./)?(?P<name>.+)")  # sha256sum marks files read as binary by a star


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def write_checksums(folder: Path) -> None:
    """Write the checksums of all files of a folder, except those in Markdown, which anyone may edit, next to them."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix != ".md")
    text = "".join(f"{checksum(path)}  {path.name}\n" for path in files)
    (folder / CHECKSUMS).write_text(text, encoding="utf-8")


def check_files(folder: Path, *names: str) -> None:
    """Compare files of a folder with their checksums. Files without a checksum are not checked.

    Args:
        folder: The folder.
        names: Names of the files; by default all that have a checksum.

    Raises:
        ValueError: A file is missing or differs, or the list of checksums is damaged.
    """
    path = folder / CHECKSUMS
    if not path.is_file():
        return  # an earlier version wrote none
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        expected = {match["name"]: match["digest"] for match in map(_parsed, lines)}
    except ValueError as error:
        raise ValueError(f"{path} is damaged: copy or export the folder again") from error
    for name in names or expected:
        file = folder / Path(name).name
        if name in expected and (not file.is_file() or checksum(file) != expected[name]):
            raise ValueError(
                f"{file} is damaged or cut short, or was edited: it does not have its checksum in {CHECKSUMS}; copy or "
                f"export the folder again, or delete {CHECKSUMS} if you edited the file"
            )


def _parsed(line: str) -> re.Match[str]:
    if match := LINE.fullmatch(line):
        return match
    raise ValueError(f"not a checksum: {line[:80]}")
