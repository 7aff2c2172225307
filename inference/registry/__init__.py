"""Drafters by the names the command line uses, and how each is built.

May import `engine`.
"""
