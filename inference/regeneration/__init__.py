"""``drafters regenerate``: the base answers the prompts of a data set itself.

May import `engine` and `runs`.
"""
