"""Neural building blocks that several drafters share: decoder layers, attention between anchors, caches.

Imports torch and `drafters.protocol` only.
"""
