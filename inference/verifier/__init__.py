"""The decoding engine: the base, its KV cache, tree attention, acceptance and the decoding loop (start at `session`).

Imports `data` and `drafters`, and no other room of `inference`.
"""
