"""``drafters chat``: a conversation in the terminal.

May import `engine`, `compiled`, `registry`, `api`, `results` and `reporting`.
"""
