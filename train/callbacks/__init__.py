"""Lightning callbacks: speed, memory estimate, skipped steps, signals, exact resume, draft-tree samples.

May import `modules` and `validation`.
"""
