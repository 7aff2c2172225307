"""``drafters regenerate``: the base writes new answers to the prompts of a data set, here or on a server."""
