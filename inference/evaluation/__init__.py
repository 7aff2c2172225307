"""``drafters eval`` and ``drafters verify``: decode benchmarks with several drafters and compare them.

May import every room of `inference` but chat, tuning, replay, regeneration and indexes.
"""
