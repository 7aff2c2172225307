"""Checks of drafters' options that several drafters share."""

from collections.abc import Sequence
from typing import Literal, get_args, get_origin, get_type_hints

from drafters.protocol import BaseShape

MAX_LAYERS = 1000  # of a drafter; it also bounds its heads and frames


def check_at_least(minimum: int, **values: float) -> None:
    """Raise ValueError if a value is below the minimum or not a number."""
    for name, value in values.items():
        if not value >= minimum:
            raise ValueError(f"{name} must be at least {minimum}, not {value}")


def check_at_most(maximum: int, **values: int) -> None:
    """Raise ValueError if a value is above the maximum, for instance before so many layers are built."""
    for name, value in values.items():
        if value > maximum:
            raise ValueError(f"{name} must be at most {maximum}, not {value}")


def check_choices(options: object) -> None:
    """Raise ValueError if a field of a dataclass is annotated with a `Literal` and holds none of its values."""
    for name, hint in get_type_hints(type(options)).items():
        value = getattr(options, name)
        if get_origin(hint) is Literal and value not in get_args(hint):
            raise ValueError(f"{name} must be one of {', '.join(get_args(hint))}, not {value!r}")


def spread_layers(num_layers: int) -> tuple[int, ...]:
    """Return five base layers that are evenly spaced from 2 to L - 2, such as 2, 9, 16, 23 and 30 of 32.

    Of fewer than eight layers they are neighbours from L - 6 or 0 on.
    """
    step, last = max(-(-(num_layers - 4) // 4), 1), max(num_layers - 6, 0)
    return tuple(min(2 + place * step, last + place) for place in range(min(5, num_layers + 1)))


def check_hidden_layers(layers: Sequence[int], base: BaseShape) -> None:
    """Raise ValueError unless ``layers`` names at least one layer of the base, and only layers that it has."""
    if not layers or not all(-1 <= layer <= base.num_layers for layer in layers):
        raise ValueError(
            f"hidden_layers are {[*layers]}, but the base has {base.num_layers} layers: give the drafter's option "
            f"hidden_layers numbers from 0, the embedding, to {base.num_layers}, or -1, the normed last state"
        )
