"""Draws docs/rooms.svg: the packages and their rooms, each room above those it may import.

``python docs/rooms_picture.py`` draws it from the table that tests/test_layering.py enforces.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[1]
Rooms = dict[str, set[str]]
COLOURS = {"train": "#dbe4ff", "inference": "#d3f9d8", "drafters": "#fff3bf", "data": "#ffe3e3"}
SAYS = {
    "train": "composes: LightningModules, commands, export",
    "inference": "decodes and measures",
    "drafters": "proposes",
    "data": "conversations, benchmarks, files",
}
WIDTH, CHIP, ROW, PAD = 940, 28, 38, 14


def rooms() -> dict[str, Rooms]:
    """What each room may import of its own package."""
    spec = importlib.util.spec_from_file_location("layering", ROOT / "tests" / "test_layering.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ROOMS


def levels(allowed: Rooms) -> list[list[str]]:
    """The rooms by rows, the ones that import nothing last."""
    depth: dict[str, int] = {}

    def depth_of(room: str) -> int:
        if room not in depth:
            depth[room] = 1 + max((depth_of(other) for other in allowed[room]), default=-1)
        return depth[room]

    for room in allowed:
        depth_of(room)
    return [[room for room in allowed if depth[room] == level] for level in sorted(set(depth.values()), reverse=True)]


def title(package: str, room: str) -> str:
    return room.removeprefix("learned.") if room else f"{package}/*.py"


def box(package: str, allowed: Rooms, x: int, y: int, width: int) -> tuple[str, int]:
    """A package with its rooms, and the height it takes."""
    rows = levels(allowed)
    height = 44 + ROW * len(rows) + PAD - (ROW - CHIP)
    parts = [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="10" fill="{COLOURS[package]}" stroke="#868e96"/>',
        f'<text x="{x + PAD}" y="{y + 26}"><tspan font-weight="bold">{package}</tspan> {SAYS[package]}</text>',
    ]
    for row, names in enumerate(rows):
        left = x + PAD
        for name in names:
            label = title(package, name)
            wide = 18 + 7.6 * len(label)
            top = y + 42 + row * ROW
            parts.append(f'<rect x="{left:.0f}" y="{top}" width="{wide:.0f}" height="{CHIP}" rx="6" fill="white"/>')
            parts.append(f'<text x="{left + 9:.0f}" y="{top + 19}" font-size="13">{label}</text>')
            left += wide + 8
        assert left <= x + width, f"the rooms of {package} do not fit into one row"
    return "\n".join(parts), height


def arrow(x: int, top: int, bottom: int) -> str:
    return f'<path d="M{x} {top} V{bottom - 3}" stroke="#495057" stroke-width="2" marker-end="url(#tip)"/>'


def draw() -> str:
    """The picture as SVG."""
    allowed, gap, half = rooms(), 34, (WIDTH - 20) // 2
    train, height = box("train", allowed["train"], 10, 10, WIDTH - 20)
    first = 10 + height
    inference, height = box("inference", allowed["inference"], 10, first + gap, WIDTH - 20)
    second = first + gap + height
    drafters, height = box("drafters", allowed["drafters"], 10, second + gap, half + 80)
    data, other = box("data", allowed["data"], half + 110, second + gap, half - 100)
    bottom = second + gap + max(height, other) + 10
    arrows = [arrow(WIDTH // 2, first, first + gap), arrow(half // 2, second, second + gap)]
    arrows.append(arrow(half + 110 + (half - 100) // 2, second, second + gap))
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
    tip += '<path d="M0 0 L8 4 L0 8 z" fill="#495057"/></marker>'
    font = 'font-family="sans-serif" font-size="15"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom}" {font}>',
            f'<defs>{tip}</defs><rect width="{WIDTH}" height="{bottom}" fill="white"/>',
            *(train, inference, drafters, data, *arrows),
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    (Path(__file__).parent / "rooms.svg").write_text(draw(), encoding="utf-8")
