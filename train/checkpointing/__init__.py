"""Writing checkpoints atomically, finding the newest complete one, and reading them without running their code.

Imports no other room of `train`.
"""
