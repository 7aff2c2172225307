"""What long-running commands share: output paths, journals, fingerprints of files, progress bars, timing.

Imports nothing of the project.
"""
