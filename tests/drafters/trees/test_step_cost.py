"""The size of a tree, chosen by its expected gain and the cost of its nodes."""

import json

import pytest

from drafters.trees.step_cost import read_costs


def test_costs_between_measured_sizes_are_interpolated(tmp_path):
    file = tmp_path / "cost.json"
    file.write_text(json.dumps({"nodes": [0, 1, 2, 4, 8], "seconds": [1, 1.5, 2.0, 2.5, 4.5]}))
    assert read_costs(file).tolist() == [1.0, 1.5, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 4.5]


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "invalid JSON"),
        ("[1]", "nodes and seconds are needed"),
        ('{"nodes": [0]}', "nodes and seconds are needed"),
        ('{"nodes": [0, 1], "seconds": [1.0]}', "lists of equal length"),
        ('{"nodes": 3, "seconds": [1.0]}', "lists of equal length"),
        ('{"nodes": [], "seconds": []}', "start at 0"),
        ('{"nodes": [1, 2], "seconds": [1.0, 1.0]}', "start at 0"),
        ('{"nodes": [0, 2, 2], "seconds": [1.0, 1.0, 1.0]}', "start at 0"),
        ('{"nodes": [0, 100000000], "seconds": [1.0, 1.0]}', "at most 1048576 nodes"),
        ('{"nodes": [0, 1.5], "seconds": [1.0, 1.0]}', "whole numbers"),
        ('{"nodes": [0, 1], "seconds": [1.0, 0]}', "positive numbers"),
        ('{"nodes": [0, 1], "seconds": [1.0, NaN]}', "positive numbers"),
        ('{"nodes": [0, 1], "seconds": [1.0, "2"]}', "positive numbers"),
    ],
)
def test_a_file_that_is_no_cost_curve_is_refused_in_one_line(tmp_path, text, said):
    file = tmp_path / "cost.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=said) as error:
        read_costs(file)
    assert str(file) in str(error.value) and "drafters step-cost" in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ValueError, match="write it with drafters step-cost"):
            read_costs(path)
