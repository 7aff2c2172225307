"""The ``lightning`` and ``drafters`` commands, and how they report errors.

May import every room of `train`.
"""
