"""Drafters that predict all draft positions in one forward pass: the shared base class and the block drafter.

May import `layers`, `losses` and `trees`.
"""
