"""What an evaluation keeps: answer records, metrics with confidence intervals, and result folders.

May import `engine` and `registry`.
"""
