"""Drafters with weights, trained on a frozen base.

Rooms build on each other in this order: layers, losses and trees; then parallel, heads and autoregressive; then ctc.
"""
