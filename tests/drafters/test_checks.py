"""Checks and defaults of options that several drafters share."""

import pytest

from drafters.checks import spread_layers


@pytest.mark.parametrize(
    "num_layers, layers",
    [
        (30, (2, 9, 16, 23, 28)),
        (32, (2, 9, 16, 23, 30)),
        (36, (2, 10, 18, 26, 34)),
        (8, (2, 3, 4, 5, 6)),
        (5, (0, 1, 2, 3, 4)),
        (2, (0, 1, 2)),
    ],
)
def test_the_fused_layers_are_evenly_spaced(num_layers, layers):
    assert spread_layers(num_layers) == layers


def test_the_fused_layers_are_different_layers_of_the_base():
    for num_layers in range(7, 129):
        layers = spread_layers(num_layers)
        assert [*layers] == sorted({*layers}) and layers[0] > 0 and layers[-1] == num_layers - 2
