"""Serving drafters: the command that prints how an engine is started with a drafter, and the engines' plugins.

May import `engine` and `registry`. No engine is imported before it runs.
"""
