"""What long-running commands share: output paths, journals, progress bars, timing.

Imports nothing of the project.
"""
