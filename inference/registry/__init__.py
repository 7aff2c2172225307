"""Drafters by the names that command lines use, and how each is built.

May import `engine`.
"""
