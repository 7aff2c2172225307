"""Writes the tree of folders into docs/design.md; ``python docs/layout.py`` after a room was added or renamed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLAIN = {  # folders without a docstring
    "benchmarks": "Scripts behind docs/results.",
    "checkpoints": "The small base of the quickstart; what an exported drafter is.",
    "configs": "Training configurations: one per method, and overlays.",
    "configs/strategy": "DDP, FSDP2 and DeepSpeed overlays.",
    "benchmarks/pretrain/words": "What the embedded conversations are made of.",
    "docs": "These pages.",
    "tests": "Mirrors the source tree.",
}
PACKAGES = ("configs", "data", "drafters", "inference", "train", "benchmarks", "checkpoints", "docs", "tests")
BLOCK = re.compile(r"(<!-- layout -->\n```text\n)(.*?)(```)", re.DOTALL)


def folders() -> list[str]:
    """The folders down to the third level, those of documentation and tests only at the first."""
    found = []
    for package in PACKAGES:
        found.append(package)
        below = (path.relative_to(ROOT) for path in (ROOT / package).rglob("*"))
        inner = [path.as_posix() for path in below if (ROOT / path).is_dir() and len(path.parts) <= 3]
        if package not in ("docs", "tests", "checkpoints"):
            found += sorted(path for path in inner if "__pycache__" not in path and not path.endswith("/page"))
    return found


def summary(folder: str) -> str:
    """The first sentence of a package's docstring, or the beginning of a long one."""
    if folder in PLAIN:
        return PLAIN[folder]
    text = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    sentence = text.splitlines()[0].replace("`", "")
    before, colon, after = sentence.partition(": ")
    if colon and before.startswith("drafters "):  # the commands of a room come before what they do
        sentence = after[0].upper() + after[1:]
    for end in (":", ","):
        if len(sentence) > 75:
            sentence = sentence.partition(end)[0].rstrip(".") + "."
    return sentence


def tree() -> str:
    """One line per folder, indented by its depth."""
    rows = [(f"{'    ' * folder.count('/')}{folder.rpartition('/')[2]}/", summary(folder)) for folder in folders()]
    return "".join(f"{name:<28}{text}\n" for name, text in rows)


if __name__ == "__main__":
    page = ROOT / "docs" / "design.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(BLOCK.sub(lambda match: match[1] + tree() + match[3], text), encoding="utf-8")
