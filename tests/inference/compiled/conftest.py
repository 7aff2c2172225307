"""A backend of torch.compile that runs the traced graphs as they are, and keeps them."""

import logging

import pytest

from inference.compiled import cache, runner, step


@pytest.fixture
def graphs(monkeypatch):
    """Returns the graphs that are traced during the test; they are not compiled further."""
    traced = []

    def backend(graph, inputs):
        traced.append(graph)
        return graph.forward

    monkeypatch.setattr(step, "BACKEND", backend)
    # pytest listens to all loggers, so torch would describe every step of a trace, which takes as long as the trace.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    return traced


@pytest.fixture
def few_shapes(monkeypatch):
    """Leaves two numbers of rows, and makes the smallest cache so small that a text of the tests outgrows it."""
    monkeypatch.setattr(runner, "NUM_ROWS", (1, 13))
    monkeypatch.setattr(cache, "SHORTEST", 32)
