"""``drafters regenerate``: the base writes new answers to the prompts of a data set.

May import `engine` and `runs`.
"""
