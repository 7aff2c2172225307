"""The CTC drafter: alignments, losses, exact prefix probabilities, and the trees built from them.

May import `parallel`, `layers`, `losses` and `trees`.
"""
