"""Serving drafters: our own server, the command that prints how an engine is started with a drafter, and plugins.

May import `engine` and `registry`. No engine is imported before it runs.
"""
