"""Commands that search for good settings: sweeps, step costs, layer skipping, Ouroboros.

May import `evaluation` and what it imports.
"""
