"""Neural building blocks that several drafters share: decoder layers, attention between anchors, caches.

May import the modules outside the rooms.
"""
