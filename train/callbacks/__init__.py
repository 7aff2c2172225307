"""Lightning callbacks: terminal output, speed, memory estimate, skipped steps, signals, exact resume, tree samples.

May import `modules` and `validation`.
"""
