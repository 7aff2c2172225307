"""Measurements behind docs/results; each module is run as ``python -m benchmarks.NAME``."""
