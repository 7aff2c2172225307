"""Refuses a model that no memory of this machine holds, before it is built."""

from __future__ import annotations

import os

MAX_LAYERS = 10_000
BYTES_PER_PARAMETER = 4


def check_size(vocab_size: int, hidden_size: int, num_layers: int, intermediate_size: int) -> None:
    """Raise ValueError if a size is not positive, or if the weights of such a decoder exceed the machine's memory."""
    sizes = {"hidden_size": hidden_size, "num_layers": num_layers, "intermediate_size": intermediate_size}
    if wrong := [f"{name} {size}" for name, size in sizes.items() if size < 1]:
        raise ValueError(f"{', '.join(wrong)}: must be at least 1")
    if num_layers > MAX_LAYERS:
        raise ValueError(f"num_layers {num_layers}: at most {MAX_LAYERS}")
    num_parameters = 2 * vocab_size * hidden_size + num_layers * hidden_size * (4 * hidden_size + 3 * intermediate_size)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_parameters * BYTES_PER_PARAMETER > memory:
        raise ValueError(
            f"a model of these sizes has {num_parameters:,} parameters, which exceed the machine's memory of "
            f"{memory >> 30} GiB: lower {', '.join(sizes)}"
        )
