"""Drafters in the formats of vLLM, speculators, SpecForge and DeepSpec, written and read."""
