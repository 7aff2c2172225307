"""How many nodes to feed: the draft tree grows while what it gains pays for what the base's step costs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


def best_size(probabilities: np.ndarray, seconds: np.ndarray, draft_seconds: float = 0.0) -> int:
    """The number of nodes that emits the most tokens a second.

    Feeding the n most probable nodes emits 1 + p_1 + ... + p_n tokens a step on average, the bonus token among them,
    where p_i is the probability that node i is accepted.

    Args:
        probabilities: (M,) of the nodes, the most probable first.
        seconds: (N + 1,) of the base's step that feeds 0, 1, ..., N nodes; N at least M.
        draft_seconds: What else a step takes, whatever it feeds: the drafter's pass.

    Returns:
        n in 0..M; of equally good ones the smallest.

    Raises:
        ValueError: The cost of so many nodes is not known.
    """
    num_nodes = len(probabilities)
    if len(seconds) <= num_nodes:
        raise ValueError(f"the step cost is known for at most {len(seconds) - 1} nodes, not for {num_nodes}")
    emitted = np.ones(num_nodes + 1)
    emitted[1:] += np.cumsum(probabilities)
    return int(np.argmax(emitted / (draft_seconds + seconds[: num_nodes + 1])))


def read_costs(path: str | Path) -> np.ndarray:
    """The curve that ``drafters step-cost`` wrote, with a straight line between the sizes it measured.

    Returns:
        (N + 1,) seconds of a step that feeds 0, 1, ..., N nodes.

    Raises:
        ValueError: The file is missing or no such curve; the message says what to do.
    """
    again = "write it with drafters step-cost"
    try:
        curve = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); {again}") from error
    except ValueError as error:
        raise ValueError(f"{path}: not a JSON file; {again}") from error
    if not isinstance(curve, dict) or not {"nodes", "seconds"} <= curve.keys():
        raise ValueError(f"{path}: no step cost: nodes and seconds are needed; {again}")
    nodes, seconds = curve["nodes"], curve["seconds"]
    if not (isinstance(nodes, list) and isinstance(seconds, list) and len(nodes) == len(seconds)):
        raise ValueError(f"{path}: nodes and seconds must be lists of equal length; {again}")
    if not all(type(count) is int for count in nodes) or nodes[:1] != [0] or sorted(set(nodes)) != nodes:
        raise ValueError(f"{path}: nodes must be whole numbers that start at 0 and grow, not {nodes}; {again}")
    if not all(type(second) in (int, float) and 0 < second < float("inf") for second in seconds):
        raise ValueError(f"{path}: seconds must be positive numbers, not {seconds}; {again}")
    return np.interp(np.arange(nodes[-1] + 1), nodes, seconds)
