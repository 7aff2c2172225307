"""Drafters without weights, kept as baselines."""
