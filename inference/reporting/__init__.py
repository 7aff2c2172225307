"""Tables, plots and the HTML report of an evaluation.

May import `results` and what it imports, and `runs`.
"""
