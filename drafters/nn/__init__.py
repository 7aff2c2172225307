"""Neural building blocks that several drafters share: decoder layers, attention between anchors, caches."""
