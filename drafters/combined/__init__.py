"""Drafters that combine a learned drafter with training-free ones.

May import `training_free`.
"""
