"""The file of `drafters step-cost`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data.files import read_json

MAX_NODES = 1 << 20


def read_costs(path: str | Path) -> np.ndarray:
    """Read the curve that ``drafters step-cost`` wrote, interpolated linearly between the measured sizes.

    Returns:
        (N + 1,) seconds of a step that feeds 0, 1, ..., N nodes.

    Raises:
        ValueError: The file is missing or does not hold such a curve.
    """
    again = "write it with drafters step-cost"
    try:
        curve = read_json(path)
    except ValueError as error:
        raise ValueError(f"{error}; {again}") from error
    if not isinstance(curve, dict) or not {"nodes", "seconds"} <= curve.keys():
        raise ValueError(f"{path}: no step cost: nodes and seconds are needed; {again}")
    nodes, seconds = curve["nodes"], curve["seconds"]
    if not (isinstance(nodes, list) and isinstance(seconds, list) and len(nodes) == len(seconds)):
        raise ValueError(f"{path}: nodes and seconds must be lists of equal length; {again}")
    if not all(type(count) is int for count in nodes) or nodes[:1] != [0] or sorted(set(nodes)) != nodes:
        raise ValueError(f"{path}: nodes must be whole numbers that start at 0 and grow, not {nodes}; {again}")
    if nodes[-1] > MAX_NODES:
        raise ValueError(f"{path}: at most {MAX_NODES} nodes, not {nodes[-1]}; {again}")
    if not all(type(second) in (int, float) and 0 < second < float("inf") for second in seconds):
        raise ValueError(f"{path}: seconds must be positive numbers, not {seconds}; {again}")
    return np.interp(np.arange(nodes[-1] + 1), nodes, seconds)
