"""Drafters with one prediction head per draft position: Medusa and Hydra.

May import `layers`, `losses` and `trees`.
"""
