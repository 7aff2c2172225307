"""The base's outputs that drafters train on, and ``drafters features``, which stores them ahead of training.

Imports no other room of `train`.
"""
