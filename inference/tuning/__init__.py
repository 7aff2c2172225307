"""Commands that search for settings: sweeps, step costs, layer skipping, Ouroboros.

May import `evaluation` and what it imports.
"""
