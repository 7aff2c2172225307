"""Drafters in the formats of engines and of other trainers, written and read: vLLM, speculators, SpecForge, DeepSpec.

May import no other room of `train`.
"""
