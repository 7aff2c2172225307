"""The LightningModules with their optimizer, metrics and distributed strategies.

May import `validation` and `feature_store`.
"""
