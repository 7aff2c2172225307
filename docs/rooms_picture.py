"""Draws docs/rooms.svg: the packages and their parts, each part above those it may import.

``python docs/rooms_picture.py`` draws it from the table that tests/test_layering.py enforces.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[1]
COLOURS = {"train": "#dbe4ff", "inference": "#d3f9d8", "drafters": "#fff3bf", "data": "#ffe3e3"}
SAYS = {
    "train": "composes: LightningModules, commands, export",
    "inference": "decodes and measures",
    "drafters": "proposes",
    "data": "conversations, benchmarks, files",
}
WIDTH, CHIP, ROW, PAD = 940, 28, 38, 14


def rooms() -> dict[str, list[list[str]]]:
    """The parts of each package by rows; a part may import those of lower rows."""
    spec = importlib.util.spec_from_file_location("layering", ROOT / "tests" / "test_layering.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {
        name: [line.split() for line in lines.split("\n")[::-1] if line.strip()]
        for name, lines in module.LAYERS.items()
    }


def wrapped(names: list[str], width: float) -> list[list[str]]:
    """Break a row of names where it is full."""
    rows: list[list[str]] = [[]]
    for name in names:
        if rows[-1] and sum(map(width_of, [*rows[-1], name])) > width:
            rows.append([])
        rows[-1].append(name)
    return rows


def width_of(name: str) -> float:
    return 26 + 7.6 * len(name)


def box(package: str, rows: list[list[str]], x: int, y: int, width: int) -> tuple[str, int]:
    """A package with its parts, and the height it takes. A row that is too long goes on in the next one."""
    rows = [part for row in rows for part in wrapped(row, width - 2 * PAD)]
    height = 44 + ROW * len(rows) + PAD - (ROW - CHIP)
    parts = [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="10" fill="{COLOURS[package]}" stroke="#868e96"/>',
        f'<text x="{x + PAD}" y="{y + 26}"><tspan font-weight="bold">{package}</tspan> {SAYS[package]}</text>',
    ]
    for row, names in enumerate(rows):
        left = x + PAD
        for name in names:
            wide = width_of(name) - 8
            top = y + 42 + row * ROW
            parts.append(f'<rect x="{left:.0f}" y="{top}" width="{wide:.0f}" height="{CHIP}" rx="6" fill="white"/>')
            parts.append(f'<text x="{left + 9:.0f}" y="{top + 19}" font-size="13">{name}</text>')
            left += wide + 8
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
