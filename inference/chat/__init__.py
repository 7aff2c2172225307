"""``drafters chat``: a conversation in the terminal.

May import `engine`, `registry`, `api`, `results` and `reporting`.
"""
