"""Drafters that the pages' examples register are forgotten after each test."""

import importlib.util
from pathlib import Path

import pytest

from drafters import registry


def load_script(name):
    """The module of a script below docs, by its path without the ending."""
    path = Path(__file__).parents[2] / "docs" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def own_registrations(monkeypatch):
    """Examples register drafters, which other tests of the same process would list."""
    registry.registered()  # the project's own first
    monkeypatch.setattr(registry, "_REGISTRATIONS", dict(registry._REGISTRATIONS))
