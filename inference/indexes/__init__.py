"""``drafters corpus`` and ``drafters datastore``: n-gram counts and suffix arrays built from text files.

May import `engine` and `runs`.
"""
