"""Drafters with weights, trained on a frozen base."""
