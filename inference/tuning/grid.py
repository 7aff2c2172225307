"""A grid over a drafter's arguments: axes of values, and a cell for each choice of one of each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from inference.registry import catalogue

FILE = "file"  # the axis of what NAME=FILE names, where an argument will not do
RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")


@dataclass(frozen=True)
class Axis:
    """An argument, and the values it takes."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """A place of the grid.

    Args:
        place: Its value on each axis.
        spec: The drafter as on a command line.
    """

    place: tuple[str, ...]
    spec: str


def read_axis(text: str) -> Axis:
    """Read ``name=value,value,...``, in which ``2..5`` is 2,3,4,5.

    >>> read_axis("order=2..4,8").values
    ('2', '3', '4', '8')

    Raises:
        ValueError: It is not of this form, or a value comes twice.
    """
    name, equals, listed = text.partition("=")
    if not equals or not re.fullmatch(r"\w+", name):
        raise ValueError(f"{text!r} is no axis: write NAME=VALUE,VALUE,... or NAME=FIRST..LAST")
    values: list[str] = []
    for part in listed.split(","):
        if ends := RANGE.fullmatch(part):
            first, last = map(int, ends.groups())
            values += [str(number) for number in range(first, last + 1)] or [""]
        else:
            values.append(part)
    if not all(values) or len(set(values)) < len(values):
        raise ValueError(f"the axis {text!r} has an empty value or range, or a value twice: name each once")
    return Axis(name, tuple(values))


def read_axes(texts: Sequence[str], drafter: str) -> list[Axis]:
    """Read all axes of a drafter's grid.

    Raises:
        ValueError: One is no axis, comes twice, or sets what the drafter's spec sets already.
    """
    axes, (_, folder, arguments) = [read_axis(text) for text in texts], catalogue.split(drafter)
    taken = [pair.partition("=")[0] for pair in arguments.split(",") if pair] + ([FILE] if folder else [])
    for axis in axes:
        if axis.name in taken:
            raise ValueError(f"{axis.name} is given twice: once, as an axis or in --drafter {drafter}, is enough")
        taken.append(axis.name)
    return axes


def cells(drafter: str, axes: Sequence[Axis]) -> list[Cell]:
    """Every place of the grid, the last axis running fastest.

    Args:
        drafter: NAME[=FILE][:key=value,...], what all cells have in common.
        axes: What differs; `FILE` stands for the file that the name names.
    """
    name, folder, arguments = catalogue.split(drafter)
    found = []
    for place in product(*(axis.values for axis in axes)):
        chosen = {axis.name: value for axis, value in zip(axes, place, strict=True)}
        file = chosen.pop(FILE, folder)
        pairs = [pair for pair in arguments.split(",") if pair] + [f"{key}={value}" for key, value in chosen.items()]
        found.append(Cell(place, name + (f"={file}" if file else "") + (f":{','.join(pairs)}" if pairs else "")))
    return found


def refuse_mistakes(axes: Sequence[Axis], grid: Sequence[Cell], errors: dict[Cell, ValueError]) -> None:
    """Raise where a value is refused wherever it stands: that is a mistake, and not a gap in the grid.

    Args:
        axes: Of the grid.
        grid: Its cells.
        errors: Why a cell was refused.
    """
    for index, axis in enumerate(axes):
        for value in axis.values:
            column = [cell for cell in grid if cell.place[index] == value]
            if all(cell in errors for cell in column):
                raise ValueError(f"{column[0].spec}: {errors[column[0]]}")
    if len(errors) == len(grid):
        raise ValueError(f"{grid[0].spec}: {errors[grid[0]]}")
