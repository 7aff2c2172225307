"""``drafters corpus`` and ``drafters datastore``: build n-gram counts and suffix arrays from text files.

May import `engine` and `runs`.
"""
