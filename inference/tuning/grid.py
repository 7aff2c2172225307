"""The grid of a sweep: axes with values of a drafter's arguments, and a cell for each combination of values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from inference import drafter_specs

MAX_VALUES = 1000  # of an axis
FILE = "file"  # the axis whose values take the place of FILE in NAME=FILE
RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")


@dataclass(frozen=True)
class Axis:
    """An argument and the values it takes."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """One combination of values.

    Args:
        place: The cell's value on each axis.
        spec: The drafter, as it is written on a command line.
    """

    place: tuple[str, ...]
    spec: str


def read_axis(text: str) -> Axis:
    """Parse ``name=value,value,...``, where ``2..5`` stands for 2,3,4,5.

    >>> read_axis("order=2..4,8").values
    ('2', '3', '4', '8')

    Raises:
        ValueError: The text does not have this form, or a value is empty or repeated.
    """
    name, equals, listed = text.partition("=")
    if not equals or not re.fullmatch(r"\w+", name):
        raise ValueError(f"{text!r} is not an axis: write NAME=VALUE,VALUE,... or NAME=FIRST..LAST")
    values: list[str] = []
    for part in listed.split(","):
        if ends := RANGE.fullmatch(part):
            first, last = map(int, ends.groups())
            if last - first >= MAX_VALUES:
                raise ValueError(f"the axis {text!r} has more than {MAX_VALUES} values: name fewer")
            values += [str(number) for number in range(first, last + 1)] or [""]
        else:
            values.append(part)
    if not all(values) or len(set(values)) < len(values):
        raise ValueError(f"the axis {text!r} has an empty value or range, or a repeated value: name each value once")
    return Axis(name, tuple(values))


def read_axes(texts: Sequence[str], drafter: str) -> list[Axis]:
    """Parse all axes of a drafter's grid.

    Raises:
        ValueError: A text is not an axis, or an argument is set twice, by two axes or by an axis and the spec.
    """
    axes, (_, folder, arguments) = [read_axis(text) for text in texts], drafter_specs.split(drafter)
    used = [pair.partition("=")[0] for pair in arguments.split(",") if pair] + ([FILE] if folder else [])
    for axis in axes:
        if axis.name in used:
            raise ValueError(f"{axis.name} is given twice: give it once, as an axis or in --drafter {drafter}")
        used.append(axis.name)
    return axes


def cells(drafter: str, axes: Sequence[Axis]) -> list[Cell]:
    """List every cell of the grid; the last axis varies fastest.

    Args:
        drafter: NAME[=FILE][:key=value,...], the part that all cells have in common.
        axes: The arguments that vary; the axis `FILE` replaces the file in the drafter's spec.
    """
    name, folder, arguments = drafter_specs.split(drafter)
    grid = []
    for place in product(*(axis.values for axis in axes)):
        values = {axis.name: value for axis, value in zip(axes, place, strict=True)}
        file = values.pop(FILE, folder)
        pairs = [pair for pair in arguments.split(",") if pair] + [f"{key}={value}" for key, value in values.items()]
        grid.append(Cell(place, name + (f"={file}" if file else "") + (f":{','.join(pairs)}" if pairs else "")))
    return grid


def refuse_mistakes(axes: Sequence[Axis], grid: Sequence[Cell], errors: dict[Cell, ValueError]) -> None:
    """Raise ValueError if a value never works, which is a mistake and not a gap in the grid.

    Args:
        axes: Axes of the grid.
        grid: All cells of the grid.
        errors: Why the drafter of a cell could not be built.
    """
    for index, axis in enumerate(axes):
        for value in axis.values:
            column = [cell for cell in grid if cell.place[index] == value]
            if all(cell in errors for cell in column):
                raise ValueError(f"{column[0].spec}: {errors[column[0]]}")
    if len(errors) == len(grid):
        raise ValueError(f"{grid[0].spec}: {errors[grid[0]]}")
