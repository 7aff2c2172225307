"""Simulated decoding on held-out text, which measures the acceptance length during training.

Imports no other room of `train`.
"""
