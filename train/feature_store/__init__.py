"""``drafters features``: hidden states of the base, computed once for many trainings.

Imports no other room of `train`.
"""
