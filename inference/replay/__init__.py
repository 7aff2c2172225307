"""``drafters replay``: token-only drafters measured on recorded answers, without a base.

May import `engine`, `registry`, `api`, `results`, `reporting` and `runs`.
"""
