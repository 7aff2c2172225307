"""Decoding simulated on held-out text, which measures the acceptance length during training, and drawings of trees.

Imports no other room of `train`.
"""
