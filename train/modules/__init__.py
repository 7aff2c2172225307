"""The LightningModules, their optimizer, metrics and distributed strategies.

May import `validation` and `feature_store`.
"""
