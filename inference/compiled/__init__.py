"""Decoding steps of fixed shape, which torch.compile turns into one graph each (start at `runner`).

May import `engine`.
"""
