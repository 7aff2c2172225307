"""Reading and writing training checkpoints.

Imports no other room of `train`.
"""
