"""Drafters that the pages' examples register are forgotten after each test."""

import pytest

from drafters import registry


@pytest.fixture(autouse=True)
def own_registrations(monkeypatch):
    """Examples register drafters, which other tests of the same process would list."""
    registry.registered()  # the project's own first
    monkeypatch.setattr(registry, "_REGISTRATIONS", dict(registry._REGISTRATIONS))
